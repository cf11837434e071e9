"""The seed engine: Agent-Lightning's own Trainer around verl 0.5, Ray, FSDP workers and vLLM, for one attempt."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slurmlight.errors import UserError
from slurmlight.modelversion import check_for_seed
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
from slurmlight.train.rollouts.children import free_port
from slurmlight.train.rollouts.runner import SQL_PLAYER
from slurmlight.train.rollouts.sql_row import to_row
from slurmlight.train.saving import Retention, prune, saving
from slurmlight.train.seed.failure import SCRATCH
from slurmlight.train.seed.hooks import Hooks, Rules
from slurmlight.train.verl import environment
from slurmlight.train.verl.gpus import idle_gpus

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


class _Attempt:
    def __init__(self, run: TrainingRun, player: str, scratch: Path) -> None:
        self.run, self.preset, self.player, self.scratch = run, run.preset, player, scratch
        self.gpus, self.nodes = self.preset.job.gpus, self.preset.job.nodes
        self.logs = run.folder.attempt(run.attempt)
        self.report = Reporter(run)
        self.tracker: Tracker | None = None
        self.looked = False
        self.steady = Steady(run.preset)
        self.ruined: Alarm | None = None

    def train(self) -> Outcome:
        resume = self._resume()
        self.steady.go_back(self.run.folder.metric_rows(), resume.step)
        self.steady.refuse(resume.step)
        self.report.beat("start")
        train, val = self._rows()
        variables = environment.COMMON | _LOCAL | self._environment()
        environment.apply(variables)
        for name in ("NO_PROXY", "no_proxy"):  # store and LLM proxy are never behind the cluster's
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))
        if self._stop_asked():
            return Outcome(finished=False, step=resume.step)
        return self._fit(resume, train, val, variables)

    def _resume(self) -> Resume:
        folder = self.run.folder.path
        for name in clean_up(folder):
            print(f"removed {name}, left by an attempt that was killed", flush=True)
        resume = resume_point(folder, max(self.gpus, 1) * self.nodes)
        for note in resume.notes:
            print(note, flush=True)
        return resume

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
        if (size := self.preset.data.val_batch_size) is not None and size < len(splits["val"]):
            raise UserError(f"data.val_batch_size={size}: this stack validates in one batch", "leave val_batch_size out")
        return [to_row(task) for task in splits["train"]], [to_row(task) for task in splits["val"]]

    def _environment(self) -> dict[str, str]:
        caches = Path(os.environ.get("SLURMLIGHT_CACHES", tempfile.gettempdir())) / f"slurmlight-{os.getuid()}"
        if self.gpus:
            own = environment.gpu(caches)
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
                if self._stop_asked():
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
            validate_first=self._validate_first(resume),
        )
        hooks = Hooks(
            beat=self._beat,
            log=self._log,
            stop=self._stop_asked,
            alive=parts.alive,
            episode_ended=parts.runners.episode_ended,
            save=self._save,
        )
        trainer.prepare(hooks, rules, resume)
        stack.callback(trainer.daemon.close)
        outcome = trainer.run()
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
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        row = {STEP: step} | {name: value for name in plain if (value := number(plain, name)) is not None}
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
        with saving(folder.path, step, max(self.gpus, 1) * self.nodes) as target:
            write(target)
        rule = Retention(trainer.max_actor_ckpt_to_keep, trainer.keep_best, trainer.keep_every)
        prune(folder.path, rule, series(folder.metric_rows(), VALIDATION))
