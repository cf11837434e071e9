"""The engine's heartbeat: written where something moved forward, at most once a second, never by a clock of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from slurmlight.runfolder import Status
from slurmlight.tracking.names import REWARD, VALIDATION, number
from slurmlight.train.engine import TrainingRun

_EVERY_S = 1.0


class Reporter:
    """Remembers the last reward and validation, so that every beat tells them."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.step = self.total = 0
        self._reward: float | None = None
        self._validation: float | None = None
        self._pace: float | None = None
        self._phase = ""
        self._last = 0.0

    def start(self, step: int, total: int) -> None:
        """The step training goes on from, and the last one; rewards are taken from the rows before it."""
        self.step, self.total = step, total
        for row in self.run.folder.metric_rows():
            if row["step"] <= step:
                self.note_row(row, None)

    def note_row(self, row: Mapping[str, Any], seconds_per_step: float | None) -> None:
        self._reward = number(row, REWARD) if REWARD in row else self._reward
        self._validation = number(row, VALIDATION) if VALIDATION in row else self._validation
        self._pace = seconds_per_step or self._pace

    def beat(self, phase: str, note: str = "") -> None:
        """Progress was made. A new phase is written at once, progress inside a phase once a second."""
        now = time.monotonic()
        if phase == self._phase and now - self._last < _EVERY_S:
            return
        self._phase, self._last = phase, now
        self.run.folder.beat(
            Status(
                step=self.step,
                total_steps=self.total,
                phase=phase,
                attempt=self.run.attempt,
                time=time.time(),
                reward=self._reward,
                validation=self._validation,
                seconds_per_step=self._pace,
                pid=os.getpid(),
                note=note,
            )
        )
