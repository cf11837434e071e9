"""The reward of an episode: the weighted sum of the parts that the preset names, each kept apart for the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from slurmlight.agents.contract import Episode, SqlTask, Turn
from slurmlight.errors import UserError
from slurmlight.presets.learning import RewardPart
from slurmlight.rewards import user
from slurmlight.rewards.catalogue import HIGHEST, REWARDS, USER_LOWEST
from slurmlight.rewards.judged import Judged
from slurmlight.rewards.parts import REGISTRY, Reward
from slurmlight.rewards.sql import Verdict


class RewardFailed(Exception):
    """A reward raised, or returned no number in its range: the episode has no reward and is not trained on."""


@dataclass(frozen=True)
class Earned:
    """``total`` is the weighted sum of ``parts`` (by name, unweighted)."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Composition:
    """Call it with a judged episode. ``plain``: execution match and nothing else."""

    weights: Mapping[str, float]
    rewards: Mapping[str, Reward]

    @property
    def plain(self) -> bool:
        return list(self.weights) == ["execution_match"]

    def __call__(self, judged: Judged) -> Earned:
        """Raises RewardFailed."""
        parts = {name: _value(name, reward, judged) for name, reward in self.rewards.items()}
        return Earned(combine(parts, self.weights), parts)


def combine(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted sum of ``parts``, in the order of ``weights``."""
    return sum(weight * parts[name] for name, weight in weights.items())


def compose(parts: Sequence[RewardPart], home: Path = Path()) -> Composition:
    """What ``[[reward]]`` says; files are looked for from ``home``. Raises UserError for a file that does not do."""
    rewards = {one.name: user.load(home / one.file, one.name) if one.file else REGISTRY[one.name] for one in parts}
    return Composition({one.name: one.weight for one in parts}, rewards)


def rehearse(parts: Sequence[RewardPart], home: Path = Path()) -> None:
    """Try the rewards of one's own on an episode that went well. Raises UserError where one raises or returns no number."""
    own = [one for one in parts if one.file]
    if not own:
        return
    turn = Turn("write", True, [{"role": "user", "content": "How many?"}], "SELECT 1", "SELECT 1", "rows", "", 10, 4, 0.1)
    task = SqlTask("rehearsal/0", "How many?", "rehearsal", Path("rehearsal.sqlite"), "SELECT 1")
    judged = Judged(Episode(task, "SELECT 1", (turn,), 0.1), "SELECT 1", Verdict(1, "match", "", False, "strict"))
    for one in own:
        try:
            _value(one.name, user.load(home / one.file, one.name), judged)
        except RewardFailed as error:
            raise UserError(f"{error}, on an episode that went well", f"correct {one.file}") from None


def _value(name: str, reward: Reward, judged: Judged) -> float:
    try:
        value: Any = reward(judged)
        number = float(value)
    except Exception as error:  # a person's own function may raise anything
        raise RewardFailed(f"reward '{name}' raised {type(error).__name__}: {error}") from error
    lowest = REWARDS[name].lowest if name in REWARDS else USER_LOWEST
    if not isfinite(number) or not lowest <= number <= HIGHEST:
        raise RewardFailed(f"reward '{name}' returned {value!r}, which is no number from {lowest:g} to {HIGHEST:g}")
    return number
