"""The embedded engine: GRPO of a tiny policy on one CPU machine, with the real gateway, agent and rewards.

It is small on purpose; scale is the verl engine's job. Same preset keys, checkpoints, metrics, stop request and resume
rule as there. A resumed run ends with the same weights, to the last bit, as one that was never interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from slurmlight.agents.contract import SqlTask
from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.rewards.compose import rehearse
from slurmlight.runfolder import RunFolder, home
from slurmlight.tracking.names import SECONDS, STEP, VALIDATION, series
from slurmlight.tracking.tracker import Tracker
from slurmlight.train.alarms import ALARMS, Alarm
from slurmlight.train.checkpoints import Resume, resume_point
from slurmlight.train.embedded.actor import Actor
from slurmlight.train.embedded.batch import make_batch, statistics
from slurmlight.train.embedded.course import Course, jobs_of
from slurmlight.train.embedded.exam import Exam, examine
from slurmlight.train.embedded.fallback import fallbacks, go_back, last_good
from slurmlight.train.embedded.policy import PolicyServer
from slurmlight.train.embedded.prepare import load_splits, make_tiny, refuse
from slurmlight.train.embedded.report import Reporter
from slurmlight.train.embedded.results import Results
from slurmlight.train.embedded.steady import MEND, Ruined, Steady
from slurmlight.train.embedded.usage import Usage
from slurmlight.train.engine import Outcome, TrainingRun
from slurmlight.train.rollouts.play import Played, Playground
from slurmlight.train.rollouts.runner import SQL_PLAYER
from slurmlight.train.rollouts.service import RolloutService
from slurmlight.train.saving import Retention, prune, saving


class EmbeddedEngine:
    """``train.engine.Engine`` on one CPU."""

    def __init__(self, player: str = SQL_PLAYER) -> None:
        self.player = player

    def train(self, run: TrainingRun) -> Outcome:
        """Raises UserError before anything is started; ChildEnded, TooManyFailed, OSError (disk full) when it cannot go on."""
        refuse(run.preset)
        torch.set_num_threads(run.preset.engine.threads)
        torch.use_deterministic_algorithms(True)
        report = Reporter(run)
        with ExitStack() as stack:
            try:
                return _Attempt(run, report, stack, self.player).train()
            except Stopped:
                return Outcome(finished=False, step=report.step)


class Stopped(Exception):
    """A stop was asked for while there was nothing new to save."""


class _Attempt:
    def __init__(self, run: TrainingRun, report: Reporter, stack: ExitStack, player: str) -> None:
        self.run, self.report, self.stack = run, report, stack
        self.preset: Preset = run.preset
        self.folder: RunFolder = run.folder
        self.logs = self.folder.attempt(run.attempt)
        self.player = player
        self.saved = 0

    def train(self) -> Outcome:
        self._prepare()
        self._react(self.steady.alarms, resumed=True)
        if self.step == 0:
            self._start_line()
        while self.step < self.total:
            if self._stop_asked():
                self._save()
                return Outcome(finished=False, step=self.step)
            self._one_step()
        self._save()
        self._finish_line()
        return Outcome(finished=True, step=self.step)

    # before the first step

    def _prepare(self) -> None:
        preset = self.preset
        rehearse(preset.reward, home())
        resume = self._resume()
        if preset.warmstart is not None:
            make_tiny(preset, self._warm_progress)
        self.report.beat("load")
        self.splits = load_splits(preset)
        self.course = Course(self.splits["train"], preset, self.folder.path / "adversarial")
        self.total = preset.trainer.total_training_steps or self.course.order.steps_per_epoch * preset.trainer.total_epochs
        self.steady = Steady(preset)
        self._restore(resume.path, resume.step)
        self.report.start(self.step, self.total)
        self.results = Results(self.folder)
        if self._stop_asked():
            raise Stopped
        self._start_processes()
        logger = preset.trainer.logger
        self.tracker = self.stack.enter_context(Tracker(self.folder, logger, self.total, self.step))
        self.save_seconds = 0.0

    def _resume(self) -> Resume:
        resume = resume_point(self.folder.path, world_size=1)
        for note in resume.notes:
            print(note, flush=True)
        return resume

    def _start_processes(self) -> None:
        data = self.preset.data
        self.report.beat("start")
        self.weights = self.logs / "policy"
        self.actor.export_model(self.weights)
        length = data.max_prompt_length + data.max_response_length
        self.policy = self.stack.enter_context(PolicyServer(self.weights, length, self.preset.runner.n_runners, self.logs))
        service = self.stack.enter_context(RolloutService(self.folder.path, self.preset, self.logs, self.player))
        service.gateway.api.register_model(self.preset.actor_rollout_ref.model.path, self.policy.endpoint)
        self.playground = Playground(
            service.gateway, service.pool, self.preset.runner.max_failed_share, watch=self.policy.check
        )
        self.usage = Usage(self.policy, service)

    def _restore(self, path: Path | None, step: int) -> None:
        """The state after ``step``; without ``path`` that before the first."""
        self.actor = Actor(self.preset)
        self.course.restart()
        self.steady.take_up({})
        self.fallbacks = len(fallbacks(self.folder.path))
        self.actor.lr_scale = self.preset.stability.fallback_lr**self.fallbacks
        self.step = self.saved = self._load(path, step) if path else 0
        self.steady.go_back(self.folder.metric_rows(), self.step)

    def _load(self, path: Path, step: int) -> int:
        if not (path / "data.pt").exists():  # a person accepted the step without it: slurmlight checkpoints --accept
            self.actor.load(path / "actor")
            return step
        data = torch.load(path / "data.pt", weights_only=True)
        if data["seed"] != self.preset.engine.seed or data["size"] != self.course.order.size:
            raise UserError(
                f"{path} was trained with seed {data['seed']} on {data['size']} tasks, the preset says seed "
                f"{self.preset.engine.seed} and {self.course.order.size} tasks",
                "put the old values back, or start a new run",
            )
        self.actor.load(path / "actor")
        self.course.take_up(data.get("course", {}))
        self.steady.take_up(data.get("moments", {}))
        return data["step"]

    def _warm_progress(self, step: int, steps: int, loss: float) -> None:
        self.report.beat("warm start", note=f"{step}/{steps} loss {loss:.3f}")
        if self._stop_asked():
            raise Stopped

    # steps

    def _one_step(self) -> None:
        started = time.perf_counter()
        self.step += 1
        self.report.step = self.step
        row: dict[str, Any] = {STEP: self.step, "training/epoch": self.course.order.epoch(self.step)}
        with self._timed(row, "gen"), self.usage.measured(row):
            played = self._play()
        with self._timed(row, "adv"):
            batch = make_batch(self.steady.rescale(played), self.preset)
        row |= statistics(played, batch) | self.course.metrics()
        with self._timed(row, "update_actor"):
            self.report.beat("update")
            row |= self.actor.update(batch.mini_batches)
            self.actor.adapt_kl(row, self.preset.stability)
        with self._timed(row, "update_weights"):
            self._publish()
        last = self.step == self.total
        if self.preset.trainer.test_freq > 0 and (last or self.step % self.preset.trainer.test_freq == 0):
            row |= self._validate()
        row["timing_s/save_checkpoint"] = self.save_seconds  # of the save before: this step's comes after its row is safe
        row[SECONDS] = time.perf_counter() - started + self.save_seconds
        self.save_seconds = 0.0
        alarms = self.steady.look(row)
        row |= {ALARMS: len(self.steady.alarms)} if self.steady.alarms else {}
        self.tracker.log(row)
        self.report.note_row(row, self.tracker.seconds_per_step)
        self.report.beat("step")
        self._react(alarms)  # may go back to an earlier step
        if self.preset.trainer.save_freq > 0 and (last or self.step % self.preset.trainer.save_freq == 0):
            self._save()

    def _play(self) -> list[Played]:
        n = self.preset.actor_rollout_ref.rollout.n
        drawn = self.course.draw(self.step)
        jobs = jobs_of(drawn, n, self.preset.engine.seed, self.step, self._named())
        played = self.playground.play(jobs, self._progress("rollout", len(jobs)))
        self.course.note(drawn, played)
        return played

    def _named(self) -> str:
        """The step in names of episodes, which are unique in an attempt: after a fallback it is trained once more."""
        return f"{self.step}-again-{self.fallbacks}" if self.fallbacks else str(self.step)

    def _react(self, alarms: Sequence[Alarm], resumed: bool = False) -> None:
        """Say them, save, and do what the preset says. A warning is given once. Raises Ruined."""
        action = self.preset.stability.on_alarm
        if not alarms or (resumed and action == "warn"):
            return
        for alarm in alarms:
            self.tracker.say(f"alarm: {alarm}")
        self._save()
        if action == "fallback" and self.fallbacks < self.preset.stability.max_fallbacks:
            return self._fall_back(alarms)
        if action != "warn":
            raise Ruined(f"stopped by an alarm after {self.fallbacks} fallbacks: {alarms[0]}; step {self.step} is saved", MEND)

    def _fall_back(self, alarms: Sequence[Alarm]) -> None:
        at_step, good = self.step, last_good(self.folder.path, min(alarm.since for alarm in alarms))
        go_back(self.folder.path, good.step if good else 0, str(alarms[0]), at_step)
        self._restore(good.path if good else None, good.step if good else 0)
        self._publish()
        self.tracker.say(
            f"fell back from step {at_step} to step {self.step}; the learning rate is {self.actor.lr_scale:g} of the preset's"
        )

    def _publish(self) -> None:
        self.actor.export(self.weights)
        self.policy.load(self.weights, self.step)

    def _validate(self) -> dict[str, float]:
        row: dict[str, float] = {}
        with self._timed(row, "testing"):
            exam = self._examine("val")
        return row | exam.metrics

    def _examine(self, split: str, stage: str = "") -> Exam:
        tasks: Sequence[SqlTask] = self.splits[split]
        progress = self._progress(f"{split} {stage}".strip(), len(tasks))
        return examine(self.playground, tasks, f"{split}{stage}-{self._named()}", progress)

    # start and finish line

    def _start_line(self) -> None:
        """What the policy can do before RL: the row of step 0 and the scores of the splits nobody trains or tunes on."""
        if self.preset.trainer.val_before_train and self.preset.trainer.test_freq > 0:
            row = {STEP: 0} | self._validate()
            self.tracker.log(row)
            self.report.note_row(row, None)
        for split in self.results.splits(self.splits):
            self.results.add(split, "start", self._examine(split, "start"))
        clean = Path(self.preset.actor_rollout_ref.model.path) / "clean"
        if clean.is_dir() and "test" in self.splits:
            self.policy.load(clean.absolute(), 0)
            self.results.add("test", "clean", self._examine("test", "clean"))
            self.policy.load(self.weights, 0)
        self.results.keep()

    def _finish_line(self) -> None:
        for split in self.results.splits(self.splits):
            self.results.add(split, "after", self._examine(split, "after"))
        self.report.beat("report")
        self.results.show(self.tracker)

    # small things

    def _save(self) -> None:
        """A checkpoint of the present step, unless there is one or nothing was trained. Raises NoSpace."""
        if self.saved == self.step:
            return
        started = time.perf_counter()
        self.report.beat("save")
        trainer = self.preset.trainer
        with saving(self.folder.path, self.step) as target:
            self.actor.save(target / "actor")
            state = {"step": self.step, "seed": self.preset.engine.seed, "moments": self.steady.kept()}
            torch.save(state | self.course.kept(self.step), target / "data.pt")
        self.saved = self.step
        rule = Retention(trainer.max_actor_ckpt_to_keep, trainer.keep_best, trainer.keep_every)
        prune(self.folder.path, rule, series(self.folder.metric_rows(), VALIDATION))
        self.save_seconds = time.perf_counter() - started

    def _stop_asked(self) -> bool:
        request = self.folder.stop_request()
        return request is not None and request.attempt >= self.run.attempt

    def _progress(self, phase: str, total: int) -> Any:
        self.report.beat(phase)
        return lambda ended: self.report.beat(phase, note=f"{ended}/{total} episodes")

    @contextmanager
    def _timed(self, row: dict[str, Any], name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        row[f"timing_s/{name}"] = time.perf_counter() - started
