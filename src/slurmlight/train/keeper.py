"""What an attempt does around a trainer of verl's on every stack: resume point, heartbeat, rows with alarms, stop, saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlight.tracking.names import STEP, VALIDATION, number, series
from slurmlight.tracking.tracker import Tracker
from slurmlight.train.alarms import ALARMS, Alarm
from slurmlight.train.checkpoints import Resume, clean_up, resume_point
from slurmlight.train.embedded.report import Reporter
from slurmlight.train.embedded.steady import MEND, Ruined, Steady
from slurmlight.train.engine import Outcome, TrainingRun
from slurmlight.train.saving import Retention, prune, saving
from slurmlight.train.verl.gpus import idle_gpus


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a trainer of verl's tells the engine and asks of it, on every stack."""

    beat: Callable[[int, str, str], None]  # step, phase, note
    log: Callable[[int, dict[str, Any]], None]  # step, verl's metrics of that step
    stop: Callable[[], bool]
    episode_ended: Callable[[], None]  # one succeeded: the runners work
    save: Callable[[int, Callable[[Path], None]], None]  # step, writer of a folder


class Keeper:
    """One attempt's place in its run folder. ``tracker`` is set once the trainer is up; ``ruined`` by an alarm that stops."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.preset = run, run.preset
        self.gpus, self.nodes = run.preset.job.gpus, run.preset.job.nodes
        self.world_size = max(self.gpus, 1) * self.nodes
        self.report = Reporter(run)
        self.tracker: Tracker | None = None
        self.steady = Steady(run.preset)
        self.ruined: Alarm | None = None
        self._looked = False

    def resume(self) -> Resume:
        """Where to go on, after clearing up what an attempt that was killed left."""
        folder = self.run.folder.path
        for name in clean_up(folder):
            print(f"removed {name}, left by an attempt that was killed", flush=True)
        resume = resume_point(folder, self.world_size)
        for note in resume.notes:
            print(note, flush=True)
        return resume

    def validate_first(self, resume: Resume) -> bool:
        """Before the first step of a run, once: an attempt that ended after that validation has left its row."""
        trainer = self.preset.trainer
        known = any(row[STEP] == 0 for row in self.run.folder.metric_rows())
        return trainer.val_before_train and trainer.test_freq > 0 and resume.step == 0 and not known

    def beat(self, step: int, phase: str, note: str) -> None:
        self.report.step = step
        self.report.beat(phase, note)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the row of ``step``; look for alarms, and once whether every GPU works."""
        assert self.tracker is not None
        row = {STEP: step} | {name: value for name in metrics if (value := number(metrics, name)) is not None}
        alarms = self.steady.look(row) if step else []
        row |= {ALARMS: len(self.steady.alarms)} if self.steady.alarms else {}
        self.tracker.log(row)
        self.report.note_row(row, self.tracker.seconds_per_step)
        for alarm in alarms:
            self.tracker.say(f"alarm: {alarm}")
        if alarms and self.preset.stability.on_alarm == "stop":
            self.ruined = alarms[0]
        if step and not self._looked:
            self._looked = True
            for line in idle_gpus(self.gpus):
                self.tracker.say(f"warning: {line}")

    def outcome(self, outcome: Outcome) -> Outcome:
        """``outcome``, the trainer's. Raises Ruined where an alarm made it stop."""
        if self.ruined and not outcome.finished:
            raise Ruined(f"stopped by an alarm: {self.ruined}; step {outcome.step} is saved", MEND)
        return outcome

    def stop_asked(self) -> bool:
        request = self.run.folder.stop_request()
        return self.ruined is not None or (request is not None and request.attempt >= self.run.attempt)

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """A checkpoint of ``step`` that is whole or invisible, then what the retention leaves. Raises NoSpace."""
        trainer, folder = self.preset.trainer, self.run.folder
        with saving(folder.path, step, self.world_size) as target:
            write(target)
        rule = Retention(trainer.max_actor_ckpt_to_keep, trainer.keep_best, trainer.keep_every)
        prune(folder.path, rule, series(folder.metric_rows(), VALIDATION))
