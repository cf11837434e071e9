"""What a reward looks at: an episode, and what judging its answer found out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmlight.agents.contract import Episode
from slurmlight.rewards.sql import Verdict
from slurmlight.sql.execute import DEFAULT, Limits


@dataclass(frozen=True)
class Judged:
    """``verdict`` is execution match's on ``databases``; ``max_tokens`` bounds one completion, ``timeout_s`` the episode."""

    episode: Episode
    gold: str
    verdict: Verdict
    databases: tuple[Path, ...] = ()
    limits: Limits = DEFAULT
    max_tokens: int = 2048
    timeout_s: float = 600.0
