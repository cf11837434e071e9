"""Agent-Lightning's trainer for verl, with this kit's life cycle around its step: stop, save, resume, liveness, heartbeat."""

# pyright: reportMissingImports=false

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.utils.profiler.performance import marked_timer

from slurmlight.train.checkpoints import Resume
from slurmlight.train.engine import Outcome
from slurmlight.train.parts import part_metrics
from slurmlight.train.rollouts.play import TooManyFailed
from slurmlight.train.verl import credit
from slurmlight.train.verl.rollouts import Hooks, Rollouts, Rules

MAX_EMPTY_STEPS = 3  # steps in a row without a usable row before the attempt ends


class Trainer(AgentLightningRayPPOTrainer):
    """One attempt. ``run`` trains from ``resume`` to the end or to a stop request; everything else is verl's."""

    def prepare(self, hooks: Hooks, rules: Rules, resume: Resume) -> Trainer:
        self.hooks, self.rules, self.resume = hooks, rules, resume
        self.empty_steps, self.save_seconds = 0, 0.0
        self.told: list[dict[str, Any]] = []
        return self

    def run(self) -> Outcome:
        """Raises TooManyFailed, NoSpace, and whatever verl, vLLM and Ray raise."""
        self.global_steps = self.saved = self.resume.step
        if self.resume.path:
            self._phase("load")
            self._load_checkpoint()
        if self.global_steps >= self.total_training_steps:
            return Outcome(finished=True, step=self.global_steps)
        assert self.checkpoint_manager is not None
        self.checkpoint_manager.update_weights(self.global_steps)  # vLLM samples from the loaded weights
        if self.rules.validate_first:
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
        metrics |= part_metrics(self.told, "training")
        metrics |= {
            "training/n_failed_rollouts": self.manager.failed,
            "training/epoch": (step - 1) // len(self.train_dataloader) + 1,
        }
        last = step >= self.total_training_steps
        trainer = self.config.trainer
        if trainer.test_freq > 0 and (last or step % trainer.test_freq == 0):
            metrics |= self._validation()
        # the save comes after its row is safe, so a row tells of the save before
        metrics |= {"timing_s/save_checkpoint": self.save_seconds, "timing_s/step": time.perf_counter() - started}
        self.hooks.log(step, metrics)
        self.save_seconds = 0.0
        if trainer.save_freq > 0 and (last or step % trainer.save_freq == 0):
            self._save()

    def _train_step(self, timing_raw: dict[str, float], curr_step_profile: bool) -> tuple[dict[str, Any], Any] | None:
        self._phase("rollout")
        self.told.clear()
        try:
            return super()._train_step(timing_raw, curr_step_profile)
        except RuntimeError as error:
            if "zero training rows" not in str(error):
                raise
            print(f"step {self.global_steps}: {error}; nothing to learn from, skipped", flush=True)
            self._abort_all_rollout_requests()  # pyright: ignore[reportUnusedCoroutine]  (its decorator awaits it)
            return None

    def _count_empty(self, empty: bool) -> None:
        self.empty_steps = self.empty_steps + 1 if empty else 0
        if self.empty_steps >= MAX_EMPTY_STEPS:
            raise TooManyFailed(f"{self.empty_steps} steps in a row gave no row to train on")

    def _rollout(self, gen_batch: Any, is_train: bool) -> tuple[Any, dict[str, Any]]:
        rows, metrics = super()._rollout(gen_batch, is_train)
        if is_train:
            credit.mark(rows, self.rules.credit)
        self._phase("update" if is_train else "validate")
        return rows, metrics

    def _update_actor(self, batch: Any) -> Any:
        credit.apply(batch)
        return super()._update_actor(batch)

    def _make_rollout_manager(self, manager_cls: type) -> Any:
        """``manager_cls`` is Agent-Lightning's choice (always the synchronous one here)."""
        self.manager = super()._make_rollout_manager(Rollouts)
        self.manager.guard(self.rules, self.hooks, lambda note: self._phase(self.phase, note), self.told)
        return self.manager

    def _phase(self, name: str, note: str = "") -> None:
        self.phase = name
        self.hooks.beat(self.global_steps, name, note)

    def _validation(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._phase("validate")
        self.told.clear()
        metrics = self._validate() | {"val/n_failed_rollouts": self.manager.failed}
        metrics |= part_metrics(self.told, "val")
        return metrics | {"timing_s/testing": time.perf_counter() - started}

    def _save(self) -> None:
        """Save the current step, unless that is done or nothing was trained."""
        if self.saved == self.global_steps:
            return
        started = time.perf_counter()
        self._phase("save")
        self.hooks.save(self.global_steps, self._write)
        self.saved = self.global_steps
        self.save_seconds = time.perf_counter() - started

    def _write(self, folder: Path) -> None:
        """verl's own layout: the shards of every rank below actor/, then the data loader's place."""
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, self.global_steps, max_ckpt_to_keep=None)
        torch.save(self.train_dataloader.state_dict(), folder / "data.pt")
