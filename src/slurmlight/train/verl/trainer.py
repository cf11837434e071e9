"""Agent-Lightning's trainer for verl, with this kit's life cycle around its step: stop, save, resume, liveness, heartbeat."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agentlightning.schemas import Rollout, RolloutState
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout, EnqueuedRollout
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.utils.profiler.performance import marked_timer

from slurmlight.train.checkpoints import Resume
from slurmlight.train.engine import Outcome
from slurmlight.train.rollouts.play import TooManyFailed

MAX_EMPTY_STEPS = 3  # steps in a row without a usable row before the attempt ends


@dataclass(frozen=True)
class Hooks:
    """What the trainer tells and asks. All are called in the trainer's own thread."""

    beat: Callable[[int, str, str], None]  # step, phase, note
    log: Callable[[int, dict[str, Any]], None]  # step, verl's metrics of that step
    stop: Callable[[], bool]
    alive: Callable[[], None]  # called several times a second; raises where gateway or runners are beyond help
    episode_ended: Callable[[], None]
    save: Callable[[int, Callable[[Path], None]], None]  # step, writer of a folder


@dataclass(frozen=True)
class Rules:
    """``seed`` is of the row choice; ``max_failed_share`` ends the attempt; ``timeout_s`` is an episode's."""

    seed: int
    timeout_s: float
    max_failed_share: float
    validate_first: bool


class Rollouts(AglRolloutManager):
    """Agent-Lightning's manager, made finite: it waits only while runners live, and failed episodes never train."""

    failed = 0

    def guard(self, rules: Rules, hooks: Hooks, progress: Callable[[str], None]) -> None:
        self.rules, self.hooks, self.progress = rules, hooks, progress
        self.ended = 0
        self._poll_interval_seconds = 0.2  # a step of a small model is over within Agent-Lightning's one second

    def _get_rollout(self, rollout_id: str) -> Rollout:
        self.hooks.alive()
        rollout = super()._get_rollout(rollout_id)
        overdue = time.time() - rollout.status.updated_at - self.rules.timeout_s
        if rollout.status.state == RolloutState.RUNNING and overdue > 30:  # its runner died hard: nobody else would say so
            self._fail(rollout_id, f"no answer {overdue:.0f} s after the time-out")
        return rollout

    def _fail(self, rollout_id: str, why: str) -> None:
        status = {"state": "failed", "error_message": why}
        self.client.patch(f"/api/rollouts/{rollout_id}", json={"status": status})

    def _build_completed_rollout(self, enqueued_rollout: EnqueuedRollout, rollout: Rollout) -> CompletedRollout:
        self.ended += 1
        if rollout.status.state == RolloutState.SUCCEEDED:
            self.hooks.episode_ended()
        self.progress(f"{self.ended} episodes")  # the heartbeat: it stops when no episode ends any more
        return super()._build_completed_rollout(enqueued_rollout, rollout)

    def enqueue_and_wait_until_completed(self, data: dict[str, Any], *, is_train: bool) -> list[CompletedRollout]:
        done = super().enqueue_and_wait_until_completed(data, is_train=is_train)
        good = [one for one in done if one.rollout_state == RolloutState.SUCCEEDED and one.final_reward is not None]
        self.failed = len(done) - len(good)
        if self.failed > self.rules.max_failed_share * len(done):
            first = next((one.error_message for one in done if one.error_message), "no reason given")
            raise TooManyFailed(f"{self.failed} of {len(done)} episodes failed, the first: {first}")
        return good


class Trainer(AgentLightningRayPPOTrainer):
    """One attempt. ``run`` trains from ``resume`` to the end or to a stop request; everything else is verl's."""

    def prepare(self, hooks: Hooks, rules: Rules, resume: Resume) -> Trainer:
        self.hooks, self.rules, self.resume = hooks, rules, resume
        self.empty_steps = 0
        return self

    def run(self) -> Outcome:
        """Raises TooManyFailed, NoSpace, and whatever verl, vLLM and Ray raise."""
        self.global_steps = self.saved = self.resume.step
        if self.resume.path:
            self._phase("load")
            self._load_checkpoint()
        if self.global_steps >= self.total_training_steps:
            return Outcome(finished=True, step=self.global_steps)
        self.checkpoint_manager.update_weights(self.global_steps)  # vLLM samples from the loaded weights
        if self.rules.validate_first and self.global_steps == 0:
            self.hooks.log(0, self._validation())
        while self.global_steps < self.total_training_steps:
            if self.hooks.stop():
                self._save()
                return Outcome(finished=False, step=self.global_steps)
            self.global_steps += 1
            self._step()
        self._save()
        return Outcome(finished=True, step=self.global_steps)

    def _step(self) -> None:
        step, timing, started = self.global_steps, {}, time.perf_counter()
        random.seed(f"{self.rules.seed}/{step}")  # Agent-Lightning draws the surplus rows from it
        with marked_timer("step", timing):
            result = self._train_step(timing, False)
        metrics, batch = result if result else ({}, None)
        self._count_empty(batch is None)
        if batch is not None:
            metrics |= compute_timing_metrics(batch=batch, timing_raw=timing)
            metrics |= compute_throughout_metrics(batch, timing, self.resource_pool_manager.get_n_gpus())
        metrics |= {"training/n_failed_rollouts": self.manager.failed, "training/epoch": self.epoch + 1}
        last = step >= self.total_training_steps
        trainer = self.config.trainer
        if trainer.test_freq > 0 and (last or step % trainer.test_freq == 0):
            metrics |= self._validation()
        if trainer.save_freq > 0 and (last or step % trainer.save_freq == 0):
            metrics["timing_s/save_checkpoint"] = self._save()
        self.hooks.log(step, metrics | {"timing_s/step": time.perf_counter() - started})

    def _train_step(self, timing_raw: dict[str, float], curr_step_profile: bool) -> tuple[dict[str, Any], Any] | None:
        self._phase("rollout")
        try:
            return super()._train_step(timing_raw, curr_step_profile)
        except RuntimeError as error:
            if "zero training rows" not in str(error):
                raise
            print(f"step {self.global_steps}: {error}; nothing to learn from, skipped", flush=True)
            self._abort_all_rollout_requests()
            return None

    def _count_empty(self, empty: bool) -> None:
        self.empty_steps = self.empty_steps + 1 if empty else 0
        if self.empty_steps >= MAX_EMPTY_STEPS:
            raise TooManyFailed(f"{self.empty_steps} steps in a row gave no row to train on")

    def _rollout(self, gen_batch: Any, is_train: bool) -> tuple[Any, dict[str, Any]]:
        out = super()._rollout(gen_batch, is_train)
        self._phase("update" if is_train else "validate")
        return out

    def _make_rollout_manager(self, manager_cls: type) -> Any:
        """``manager_cls`` is Agent-Lightning's choice (always the synchronous one here)."""
        self.manager = super()._make_rollout_manager(Rollouts)
        self.manager.guard(self.rules, self.hooks, lambda note: self._phase(self.phase, note))
        return self.manager

    def _phase(self, name: str, note: str = "") -> None:
        self.phase = name
        self.hooks.beat(self.global_steps, name, note)

    def _validation(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._phase("validate")
        metrics = self._validate()
        return metrics | {"timing_s/testing": time.perf_counter() - started}

    def _save(self) -> float:
        """Save the current step unless that is done; the seconds it took."""
        started = time.perf_counter()
        if self.saved != self.global_steps:
            self._phase("save")
            self.hooks.save(self.global_steps, self._write)
            self.saved = self.global_steps
        return time.perf_counter() - started

    def _write(self, folder: Path) -> None:
        """verl's own layout: the shards of every rank below actor/, then the data loader's place."""
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, self.global_steps, max_ckpt_to_keep=None)
        torch.save(self.train_dataloader.state_dict(), folder / "data.pt")
