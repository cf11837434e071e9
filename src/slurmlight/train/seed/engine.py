"""The seed engine: Agent-Lightning's own Trainer around verl 0.5, Ray, FSDP workers and vLLM, for one attempt."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slurmlight.errors import UserError
from slurmlight.modelversion import check_for_seed
from slurmlight.rewards.compose import rehearse
from slurmlight.runfolder import home
from slurmlight.tracking.tracker import Tracker
from slurmlight.train import modelfolder
from slurmlight.train.checkpoints import Resume
from slurmlight.train.embedded.prepare import load_splits, make_tiny
from slurmlight.train.engine import Outcome, TrainingRun
from slurmlight.train.keeper import Keeper
from slurmlight.train.lengths import fitting
from slurmlight.train.rollouts.children import free_port
from slurmlight.train.rollouts.runner import SQL_PLAYER
from slurmlight.train.rollouts.sql_row import to_row
from slurmlight.train.seed.failure import SCRATCH
from slurmlight.train.seed.hooks import Hooks, Rules
from slurmlight.train.verl import environment

_LOCAL = {  # AgentOps and litellm: no log file in the current folder, no links to a service, no look-up of prices at import
    "AGENTOPS_LOGGING_TO_FILE": "false",
    "AGENTOPS_LOG_SESSION_REPLAY_URL": "false",
    "AGENTOPS_ENV_DATA_OPT_OUT": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
STORE_GRACE_S = 40.0  # beyond an episode's time-out, which its runner enforces: then the store gives it up


def check_installed() -> None:
    """Raises UserError where this Python holds another stack, or none."""
    try:
        have = version("agentlightning")
    except PackageNotFoundError:
        have = "none"
    if not have.startswith("0.3."):
        raise UserError(
            f"the seed stack is not in this Python ({sys.executable}, agentlightning {have})",
            "give the job the seed image (docs/images.md), or an environment of docker/seed/requirements.lock",
        )


class SeedEngine:
    """``train.engine.Engine`` by verl 0.5, vLLM 0.10 and Agent-Lightning 0.3; without GPUs the CPU stands for one."""

    def __init__(self, player: str = SQL_PLAYER) -> None:
        self.player = player

    def train(self, run: TrainingRun) -> Outcome:
        """Raises UserError (environment, preset, data or model; before anything is started), and whatever the parts raise."""
        check_installed()
        scratch = Path(tempfile.mkdtemp(prefix="sl-"))  # short: socket paths end at 107 bytes
        try:
            return _Attempt(run, self.player, scratch).train()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


class _Attempt(Keeper):
    def __init__(self, run: TrainingRun, player: str, scratch: Path) -> None:
        super().__init__(run)
        self.player, self.scratch = player, scratch
        self.logs = run.folder.attempt(run.attempt)

    def train(self) -> Outcome:
        resume = self.resume()
        self.steady.go_back(self.run.folder.metric_rows(), resume.step)
        self.steady.refuse(resume.step)
        self.report.beat("start")
        train, val = self._rows()
        variables = environment.COMMON | _LOCAL | self._environment()
        environment.apply(variables)
        for name in ("NO_PROXY", "no_proxy"):  # store and LLM proxy are never behind the cluster's
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))
        if self.stop_asked():
            return Outcome(finished=False, step=resume.step)
        return self._fit(resume, train, val, variables)

    def _rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        rehearse(self.preset.reward, home())
        if self.preset.warmstart is not None:
            make_tiny(self.preset, lambda step, steps, loss: self.report.beat("warm start", f"{step}/{steps} loss {loss:.3f}"))
        model = Path(self.preset.actor_rollout_ref.model.path)
        check_for_seed(model)
        for line in modelfolder.check(model):
            print(f"model: {line}", flush=True)
        splits = load_splits(self.preset)
        for name in ("train", "val"):
            splits[name], told = fitting(self.preset, name, splits[name])
            if told:
                print(told, flush=True)
        return [to_row(task) for task in splits["train"]], [to_row(task) for task in splits["val"]]

    def _environment(self) -> dict[str, str]:
        if self.gpus:
            own = environment.gpu()
        else:
            from slurmlight.train.seed import cpu_lane

            cpu_lane.shims.install()
            own = cpu_lane.variables(self.scratch, self.preset.engine.threads)
        return own | {SCRATCH: str(self.scratch)}

    def _fit(self, resume: Resume, train: list[Any], val: list[Any], variables: dict[str, str]) -> Outcome:
        """Agent-Lightning forks the runners, serves the store, and calls ``attempt`` in this process."""
        from slurmlight.train import raysession
        from slurmlight.train.seed import config, fit, start

        settings = config.build(self.preset, folder=self.run.folder.path, gpus=self.gpus, nodes=self.nodes)
        start.check(settings, self.gpus, self.nodes)
        self.logs.mkdir(parents=True, exist_ok=True)
        parts = fit.Parts(self.preset, self.player, self.logs, free_port(), self.scratch)

        def attempt(store: Any, adapter: Any) -> Outcome:
            ray = raysession.ray_session(self.scratch, start.runtime(variables), self.gpus, self.preset.job.cpus)
            self.report.beat("ray")
            with ray, ExitStack() as stack:
                if self.stop_asked():
                    return Outcome(finished=False, step=resume.step)
                self.report.beat("workers")
                trainer = start.trainer(settings, train, val, store, parts.proxy, adapter)
                return self._train(trainer, parts, resume, stack)

        return fit.run(parts, attempt)

    def _train(self, trainer: Any, parts: Any, resume: Resume, stack: ExitStack) -> Outcome:
        preset, folder = self.preset, self.run.folder
        self.report.start(resume.step, trainer.total_training_steps)
        self.tracker = stack.enter_context(Tracker(folder, preset.trainer.logger, trainer.total_training_steps, resume.step))
        rules = Rules(
            seed=preset.engine.seed,
            timeout_s=preset.runner.rollout_timeout_s + STORE_GRACE_S,
            max_failed_share=preset.runner.max_failed_share,
            validate_first=self.validate_first(resume),
        )
        hooks = Hooks(
            beat=self.beat,
            log=self.log,
            stop=self.stop_asked,
            alive=parts.alive,
            episode_ended=parts.runners.episode_ended,
            save=self.save,
        )
        trainer.prepare(hooks, rules, resume)
        stack.callback(trainer.daemon.close)
        return self.outcome(trainer.run())

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        super().log(step, {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()})
