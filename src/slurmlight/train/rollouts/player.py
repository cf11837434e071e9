"""What a runner plays: a rollout's input becomes an episode and its reward. The SQL player serves every engine.

A player is made once per runner process by a function named on the runner's command line (``module:function``) and is then
awaited for many episodes at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slurmlight.agents.contract import Endpoint
from slurmlight.errors import UserError
from slurmlight.presets import Preset


@dataclass(frozen=True)
class Parts:
    """A composed reward taken apart: every part by name, ``plain`` execution match, and a score of each learning call."""

    rewards: dict[str, float]
    plain: float
    calls: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Score:
    """What an episode earned. ``reason`` is one word or line for statistics, ``detail`` is for reports (JSON values).

    Without ``parts`` the reward is execution match itself. Validation reports ``parts.plain``, whatever training is paid by.
    """

    reward: float
    reason: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    parts: Parts | None = None


class Player(Protocol):
    async def __call__(self, row: Mapping[str, Any], llm: Endpoint) -> Score:
        """Play one episode of ``row``. Raises where it could not be played: the rollout then fails and has no reward."""
        ...


def load_player(name: str, preset: Preset) -> Player:
    """The player that ``module:function`` makes of ``preset``. Raises UserError for a name that leads nowhere."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)(preset)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"no player called {name!r} ({error})", "name it as module:function") from None
