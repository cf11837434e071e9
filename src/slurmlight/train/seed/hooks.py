"""What the seed trainer tells the engine and asks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slurmlight.train import keeper


@dataclass(frozen=True)
class Death:
    """A runner that ended by itself: its worker id in the store, and how it ended."""

    worker: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Hooks(keeper.Hooks):
    """``alive`` and ``episode_ended`` are called in the daemon's thread while the trainer's waits, the others in its own."""

    alive: Callable[[], list[Death]]  # several times a second; raises where the attempt cannot go on


@dataclass(frozen=True)
class Rules:
    """``seed`` is of the row choice; ``timeout_s`` an episode's at the store; ``max_failed_share`` ends the attempt."""

    seed: int
    timeout_s: float
    max_failed_share: float
    validate_first: bool
