"""What an engine calls once a step: the row goes to metrics.jsonl, to the console, and by a process of its own to SwanLab."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from slurmlight.runfolder import RunFolder
from slurmlight.secrets import redact
from slurmlight.tracking.console import StepProgress
from slurmlight.tracking.names import STEP
from slurmlight.tracking.relay import Relay
from slurmlight.tracking.swanlab_mode import Mode, choose_mode


class Tracker:
    """Use as ``with Tracker(folder, logger, total, done) as tracker:``, then ``tracker.log({"step": 1, ...})`` a step.

    ``logger`` is trainer.logger, ``total`` the last step, ``done`` the step the run resumes from. SwanLab never stops a
    run: where it fails one warning is shown and metrics.jsonl, which is written first, still has everything.
    Raises UserError for settings SwanLab refuses, OSError where metrics.jsonl cannot be written.
    """

    def __init__(self, folder: RunFolder, logger: Sequence[str], total: int, done: int = 0) -> None:
        self.folder = folder
        self.progress = StepProgress(total, done)
        self._mode: Mode = choose_mode(logger, os.environ)
        self._relay: Relay | None = None
        self._noticed = False

    def __enter__(self) -> Tracker:
        self.progress.__enter__()
        if self._mode != "disabled":
            try:
                self._relay = Relay(self.folder, self._mode)
            except OSError as error:
                self._warn(str(error))
            else:
                logs = self.folder.path / "swanlab"
                later = "" if self._mode == "cloud" else f", files in {logs} (to upload them: swanlab sync {logs}/run-*)"
                self.say(f"SwanLab: {self._mode} mode{later}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.__exit__()
        if self._relay:
            trouble = self._relay.close()
            self._listen()
            if trouble and self._relay:
                self._warn(trouble)

    def log(self, row: Mapping[str, Any]) -> None:
        """One row a step, names as in names.py, ``step`` among them."""
        if not isinstance(row.get(STEP), int):
            raise ValueError("a row of metrics needs its step")
        self.folder.add_metrics(dict(row))
        self.progress.show(row)
        self._listen()

    def say(self, text: str) -> None:
        self.progress.say(redact(text))

    @property
    def seconds_per_step(self) -> float | None:
        return self.progress.seconds_per_step

    def _listen(self) -> None:
        if self._relay and not self._noticed and (notice := self._relay.notice):
            self._noticed = True
            self.say(f"warning: {notice}")
        if self._relay and (trouble := self._relay.trouble):
            self._warn(trouble)

    def _warn(self, trouble: str) -> None:
        self._relay = None
        self.say(f"warning: SwanLab is off ({trouble}); training goes on, metrics.jsonl has every step")
