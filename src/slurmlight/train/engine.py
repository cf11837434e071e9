"""The one engine contract: same preset keys, checkpoints, metrics, stop request and resume rule in every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slurmlight.presets import Preset
from slurmlight.runfolder import RunFolder

EXIT_FINISHED = 0
EXIT_BAD_CONFIG = 2  # no requeue: the next attempt would fail alike
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: saved, wants to go on later


@dataclass(frozen=True)
class TrainingRun:
    """What an engine gets: the run folder, the resolved preset and which attempt this is (from 1)."""

    folder: RunFolder
    preset: Preset
    attempt: int


@dataclass(frozen=True)
class Outcome:
    """How training ended: ``finished`` (nothing is left) or stopped on request after ``step`` was saved. Crashes raise."""

    finished: bool
    step: int


class Engine(Protocol):
    def train(self, run: TrainingRun) -> Outcome: ...
