"""The verl engine: gateway and runners, Ray, FSDP workers and vLLM around one attempt of training."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from slurmlight.errors import UserError
from slurmlight.rewards.compose import rehearse
from slurmlight.runfolder import home
from slurmlight.tracking.names import STEP, VALIDATION, number, series
from slurmlight.tracking.tracker import Tracker
from slurmlight.train import modelfolder
from slurmlight.train.alarms import ALARMS, Alarm
from slurmlight.train.checkpoints import Resume, clean_up, resume_point
from slurmlight.train.embedded.prepare import load_splits, make_tiny
from slurmlight.train.embedded.report import Reporter
from slurmlight.train.embedded.steady import MEND, Ruined, Steady
from slurmlight.train.engine import Outcome, TrainingRun
from slurmlight.train.lengths import fitting
from slurmlight.train.rollouts.gateway import GatewayApi
from slurmlight.train.rollouts.service import RolloutService
from slurmlight.train.rollouts.sql_row import to_row
from slurmlight.train.saving import Retention, prune, saving
from slurmlight.train.verl import environment
from slurmlight.train.verl.gpus import idle_gpus


class VerlEngine:
    """``train.engine.Engine`` by verl 0.9, vLLM and Agent-Lightning 1.0; without GPUs the CPU stands for one."""

    def train(self, run: TrainingRun) -> Outcome:
        """Raises UserError (bad preset, data or model, found before anything is started) and whatever the parts raise."""
        with ExitStack() as stack:
            scratch = Path(tempfile.mkdtemp(prefix="sl-"))  # short: Ray's socket paths end at 107 bytes
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            return _Attempt(run, scratch, stack).train()


class _Ended:
    """Each call: the episodes that ended since the call before."""

    def __init__(self, api: GatewayApi) -> None:
        self.api, self.cursor = api, 0

    def __call__(self) -> Iterable[str]:
        ended, self.cursor = self.api.ended(self.cursor)
        return ended


class _Attempt:
    def __init__(self, run: TrainingRun, scratch: Path, stack: ExitStack) -> None:
        self.run, self.preset, self.scratch, self.stack = run, run.preset, scratch, stack
        self.gpus, self.nodes = self.preset.job.gpus, self.preset.job.nodes
        self.world_size = max(self.gpus, 1) * self.nodes
        self.report = Reporter(run)
        self.tracker: Tracker | None = None
        self.looked = False
        self.steady = Steady(run.preset)
        self.ruined: Alarm | None = None

    def train(self) -> Outcome:
        resume = self._resume()
        self.report.beat("start")
        train, val = self._rows()
        caches = Path(os.environ.get("SLURMLIGHT_CACHES", tempfile.gettempdir())) / f"slurmlight-{os.getuid()}"
        own = environment.gpu(caches) if self.gpus else environment.cpu(self.scratch, self.preset.engine.threads)
        environment.apply(environment.COMMON | own)
        return self._run(resume, train, val, environment.COMMON | own)

    def _resume(self) -> Resume:
        folder = self.run.folder.path
        for name in clean_up(folder):
            print(f"removed {name}, left by an attempt that was killed", flush=True)
        resume = resume_point(folder, self.world_size)
        for note in resume.notes:
            print(note, flush=True)
        return resume

    def _rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        preset = self.preset
        rehearse(preset.reward, home())
        if preset.warmstart is not None:
            make_tiny(preset, lambda step, steps, loss: self.report.beat("warm start", f"{step}/{steps} loss {loss:.3f}"))
        for line in modelfolder.check(Path(preset.actor_rollout_ref.model.path)):
            print(f"model: {line}", flush=True)
        splits = load_splits(preset)
        for name in ("train", "val"):
            splits[name], told = fitting(preset, name, splits[name])
            if told:
                print(told, flush=True)
        if len(splits["train"]) < preset.data.train_batch_size:
            raise UserError(
                f"{preset.data.train_files} has {len(splits['train'])} rows, "
                f"fewer than data.train_batch_size={preset.data.train_batch_size}",
                "lower the batch or give more rows",
            )
        return [to_row(task) for task in splits["train"]], [to_row(task) for task in splits["val"]]

    def _run(self, resume: Resume, train: list[Any], val: list[Any], variables: dict[str, str]) -> Outcome:
        from slurmlight.train.verl import config, start
        from slurmlight.train.verl.trainer import Hooks, Rules

        preset, folder = self.preset, self.run.folder
        self.steady.go_back(folder.metric_rows(), resume.step)
        self.steady.refuse(resume.step)
        settings = config.build(preset, folder=folder.path, gpus=self.gpus, nodes=self.nodes)
        start.check(settings, self.gpus, self.nodes)
        service = self.stack.enter_context(RolloutService(folder.path, preset, folder.attempt(self.run.attempt)))
        settings.agentlightning.agl_base_url, settings.agentlightning.agl_key = service.url, service.key
        if resume.path:
            settings.trainer.resume_mode, settings.trainer.resume_from_path = "resume_path", str(resume.path)
        if self._stop_asked():  # bringing up Ray and its workers takes a minute or more each
            return Outcome(finished=False, step=resume.step)
        self.report.beat("ray")
        self.stack.enter_context(start.ray_session(self.scratch, variables, self.gpus, preset.job.cpus))
        if self._stop_asked():
            return Outcome(finished=False, step=resume.step)
        self.report.beat("workers")
        trainer = start.trainer(settings, train, val)
        self.report.start(resume.step, trainer.total_training_steps)
        self.tracker = self.stack.enter_context(
            Tracker(folder, preset.trainer.logger, trainer.total_training_steps, resume.step)
        )
        rules = Rules(
            seed=preset.engine.seed,
            timeout_s=preset.runner.rollout_timeout_s,
            max_failed_share=preset.runner.max_failed_share,
            validate_first=self._validate_first(resume),
            credit=preset.credit,
        )
        hooks = Hooks(
            beat=self._beat,
            log=self._log,
            stop=self._stop_asked,
            alive=service.check,
            ended=_Ended(service.gateway.api),
            episode_ended=service.pool.episode_ended,
            save=self._save,
        )
        try:
            outcome = trainer.prepare(hooks, rules, resume).run()
        except httpx.HTTPError as error:  # in one of Agent-Lightning's own calls
            raise service.gateway.gone(error) from error
        if self.ruined and not outcome.finished:
            raise Ruined(f"stopped by an alarm: {self.ruined}; step {outcome.step} is saved", MEND)
        return outcome

    def _validate_first(self, resume: Resume) -> bool:
        """Before the first step of a run, once: an attempt that ended after that validation has left its row."""
        trainer = self.preset.trainer
        known = any(row[STEP] == 0 for row in self.run.folder.metric_rows())
        return trainer.val_before_train and trainer.test_freq > 0 and resume.step == 0 and not known

    # what the trainer calls

    def _beat(self, step: int, phase: str, note: str) -> None:
        self.report.step = step
        self.report.beat(phase, note)

    def _log(self, step: int, metrics: dict[str, Any]) -> None:
        assert self.tracker is not None
        row = {STEP: step} | {name: value for name in metrics if (value := number(metrics, name)) is not None}
        if (entropy := number(metrics, "actor/entropy_loss")) is not None:  # verl 0.9's name of it
            row["actor/entropy"] = entropy
        alarms = self.steady.look(row) if step else []
        row |= {ALARMS: len(self.steady.alarms)} if self.steady.alarms else {}
        self.tracker.log(row)
        self.report.note_row(row, self.tracker.seconds_per_step)
        for alarm in alarms:
            self.tracker.say(f"alarm: {alarm}")
        if alarms and self.preset.stability.on_alarm == "stop":
            self.ruined = alarms[0]
        if step and not self.looked:
            self.looked = True
            for line in idle_gpus(self.gpus):
                self.tracker.say(f"warning: {line}")

    def _stop_asked(self) -> bool:
        request = self.run.folder.stop_request()
        return self.ruined is not None or (request is not None and request.attempt >= self.run.attempt)

    def _save(self, step: int, write: Callable[[Path], None]) -> None:
        trainer, folder = self.preset.trainer, self.run.folder
        with saving(folder.path, step, self.world_size) as target:
            write(target)
        rule = Retention(trainer.max_actor_ckpt_to_keep, trainer.keep_best, trainer.keep_every)
        prune(folder.path, rule, series(folder.metric_rows(), VALIDATION))
