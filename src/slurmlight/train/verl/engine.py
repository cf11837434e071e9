"""The verl engine: gateway and runners, Ray, FSDP workers and vLLM around one attempt of training."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from slurmlight.errors import UserError
from slurmlight.rewards.compose import rehearse
from slurmlight.runfolder import home
from slurmlight.tracking.names import number
from slurmlight.tracking.tracker import Tracker
from slurmlight.train import modelfolder
from slurmlight.train.checkpoints import Resume
from slurmlight.train.embedded.prepare import load_splits, make_tiny
from slurmlight.train.engine import Outcome, TrainingRun
from slurmlight.train.keeper import Keeper
from slurmlight.train.lengths import fitting
from slurmlight.train.rollouts.gateway import Ended, GatewayApi
from slurmlight.train.rollouts.service import RolloutService
from slurmlight.train.rollouts.sql_row import to_row
from slurmlight.train.verl import environment


class VerlEngine:
    """``train.engine.Engine`` by verl 0.9, vLLM and Agent-Lightning 1.0; without GPUs the CPU stands for one."""

    def train(self, run: TrainingRun) -> Outcome:
        """Raises UserError (bad preset, data or model, found before anything is started) and whatever the parts raise."""
        with ExitStack() as stack:
            scratch = Path(tempfile.mkdtemp(prefix="sl-"))  # short: Ray's socket paths end at 107 bytes
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            return _Attempt(run, scratch, stack).train()


class _EndedSince:
    """Each call: the episodes that ended since the call before."""

    def __init__(self, api: GatewayApi) -> None:
        self.api, self.cursor = api, 0

    def __call__(self) -> Iterable[Ended]:
        ended, self.cursor = self.api.ended(self.cursor)
        return ended


class _Attempt(Keeper):
    def __init__(self, run: TrainingRun, scratch: Path, stack: ExitStack) -> None:
        super().__init__(run)
        self.scratch, self.stack = scratch, stack

    def train(self) -> Outcome:
        resume = self.resume()
        self.report.beat("start")
        train, val = self._rows()
        cpu_threads = self.preset.engine.threads
        own = environment.gpu() | environment.WORKERS if self.gpus else environment.cpu(self.scratch, cpu_threads)
        environment.apply(environment.COMMON | own)
        return self._run(resume, train, val, environment.COMMON | own)

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
        from slurmlight.train.verl.rollouts import Hooks, Rules

        preset, folder = self.preset, self.run.folder
        self.steady.go_back(folder.metric_rows(), resume.step)
        self.steady.refuse(resume.step)
        settings = config.build(preset, folder=folder.path, gpus=self.gpus, nodes=self.nodes)
        start.check(settings, self.gpus, self.nodes)
        service = self.stack.enter_context(RolloutService(folder.path, preset, folder.attempt(self.run.attempt)))
        settings.agentlightning.agl_base_url, settings.agentlightning.agl_key = service.url, service.key
        if resume.path:
            settings.trainer.resume_mode, settings.trainer.resume_from_path = "resume_path", str(resume.path)
        if self.stop_asked():  # bringing up Ray and its workers takes a minute or more each
            return Outcome(finished=False, step=resume.step)
        self.report.beat("ray")
        self.stack.enter_context(start.ray_session(self.scratch, variables, self.gpus, preset.job.cpus))
        if self.stop_asked():
            return Outcome(finished=False, step=resume.step)
        self.report.beat("workers")
        trainer = start.trainer(settings, train, val)
        self.report.start(resume.step, trainer.total_training_steps)
        self.tracker = self.stack.enter_context(
            Tracker(folder, preset.trainer.logger, trainer.total_training_steps, resume.step)
        )
        rules = Rules(
            seed=preset.engine.seed,
            max_failed_share=preset.runner.max_failed_share,
            validate_first=self.validate_first(resume),
            credit=preset.credit,
        )
        hooks = Hooks(
            beat=self.beat,
            log=self.log,
            stop=self.stop_asked,
            alive=service.check,
            ended=_EndedSince(service.gateway.api),
            episode_ended=service.pool.episode_ended,
            forget=service.gateway.api.forget,
            save=self.save,
        )
        try:
            return self.outcome(trainer.prepare(hooks, rules, resume).run())
        except httpx.HTTPError as error:  # in one of Agent-Lightning's own calls
            raise service.gateway.gone(error) from error

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        entropy = number(metrics, "actor/entropy_loss")  # verl 0.9's name of it
        super().log(step, metrics if entropy is None else metrics | {"actor/entropy": entropy})
