"""Agent-Lightning 0.3's trainer for verl 0.5, with this kit's life cycle around its step: stop, save, resume, heartbeat."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agentlightning.verl.trainer import AgentLightningTrainer
from omegaconf import open_dict

from slurmlight.errors import UserError
from slurmlight.train.checkpoints import Resume
from slurmlight.train.embedded.order import DataOrder
from slurmlight.train.engine import Outcome
from slurmlight.train.rollouts.play import TooManyFailed
from slurmlight.train.seed.daemon import Daemon, NothingToLearn
from slurmlight.train.seed.hooks import Hooks, Rules

MAX_EMPTY_STEPS = 3  # steps in a row without a usable row before the attempt ends
# names of tracking.names where this stack's differ
_ALIASES = {
    "actor/entropy": "actor/entropy_loss",
    "prompt_length/mean": "prompt_length/mean_after_processing",
    "response_length/mean": "response_length/mean_after_processing",
}


class Trainer(AgentLightningTrainer):
    """One attempt. ``run`` trains from ``resume`` to the end or to a stop request; the step itself is Agent-Lightning's."""

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        """No loader: which rows a step gets follows from seed and step, so a resume needs no loader's state."""
        self.rows, self.val_rows = list(train_dataset), list(val_dataset)
        self.order = DataOrder(len(self.rows), self.config.data.train_batch_size, self.config.agentlightning.seed)
        trainer = self.config.trainer
        self.total_training_steps = trainer.total_training_steps or self.order.steps_per_epoch * trainer.total_epochs
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def prepare(self, hooks: Hooks, rules: Rules, resume: Resume) -> Trainer:
        self.hooks, self.rules, self.resume = hooks, rules, resume
        self.empty_steps, self.save_seconds, self.phase = 0, 0.0, ""
        self.global_steps = self.saved = resume.step
        config = self.config
        self.agent_mode_daemon = self.daemon_cls(
            None,
            config.actor_rollout_ref.rollout.n,
            train_information={
                "model": "/".join(config.actor_rollout_ref.model.path.split("/")[-2:]),  # as verl 0.5's server names it
                "temperature": config.actor_rollout_ref.rollout.temperature,
            },
            tokenizer=self.tokenizer,
            mini_batch_size=config.actor_rollout_ref.actor.ppo_mini_batch_size,
            pad_token_id=self.tokenizer.pad_token_id,
            store=self.store,
            llm_proxy=self.llm_proxy,
            adapter=self.adapter,
            trace_aggregator=config.agentlightning.trace_aggregator,
        ).guard(rules, hooks, lambda note: self._phase(self.phase, note))
        return self

    @property
    def daemon(self) -> Daemon:
        return self.agent_mode_daemon

    def run(self) -> Outcome:
        """Raises TooManyFailed, NoSpace, and whatever verl, vLLM and Ray raise."""
        if self.resume.path:
            self._load(self.resume.path)
        if self.global_steps >= self.total_training_steps:
            return Outcome(finished=True, step=self.global_steps)
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
        step, started = self.global_steps, time.perf_counter()
        random.seed(f"{self.rules.seed}/{step}")  # surplus rows are drawn from it
        metrics = self._train()
        metrics |= {name: metrics[other] for name, other in _ALIASES.items() if other in metrics}
        metrics["training/epoch"] = self.order.epoch(step)
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

    def _train(self) -> dict[str, Any]:
        self._phase("rollout")
        rows = [self.rows[index] for index in self.order.tasks(self.global_steps)]
        try:
            metrics = self._train_step(_batch(rows) | {"fake_ids": torch.ones(len(rows), 1, dtype=torch.int)})
        except NothingToLearn as error:
            self.empty_steps += 1
            if self.empty_steps >= MAX_EMPTY_STEPS:
                raise TooManyFailed(f"{self.empty_steps} steps in a row gave nothing to train on: {error}") from error
            print(f"step {self.global_steps}: {error}; skipped", flush=True)
            self._end_rollouts()
            return {"training/n_failed_rollouts": self.daemon.failed}
        self.empty_steps = 0
        return metrics

    def _validation(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._phase("validate")
        self.async_rollout_manager.wake_up()
        self.daemon.set_up_data_and_server(_batch(self.val_rows), self.async_rollout_manager.server_addresses, is_train=False)
        self.daemon.run_until_all_finished()
        metrics = self.daemon.get_test_metrics() | {"val/n_failed_rollouts": self.daemon.failed}
        self._end_rollouts()
        return metrics | {"timing_s/testing": time.perf_counter() - started}

    def _end_rollouts(self) -> None:
        self.daemon.clear_data_and_server()
        self.async_rollout_manager.sleep()

    def _phase(self, name: str, note: str = "") -> None:
        self.phase = name
        self.hooks.beat(self.global_steps, name, note)

    def _load(self, folder: Path) -> None:
        self._phase("load")
        place = torch.load(folder / "data.pt", weights_only=True) if (folder / "data.pt").exists() else {}
        here = {"seed": self.order.seed, "size": self.order.size}
        if place and {name: place.get(name) for name in here} != here:
            raise UserError(
                f"{folder} was trained with {place.get('size')} rows and seed {place.get('seed')}, now there are "
                f"{here['size']} rows and seed {here['seed']}",
                "put the old values back, or start a new run",
            )
        self.actor_rollout_wg.load_checkpoint(str(folder / "actor"), del_local_after_load=False)

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
        """verl's layout: the shards of every rank below actor/, then the data's place."""
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, self.global_steps, max_ckpt_to_keep=None)
        place = {"step": self.global_steps, "seed": self.order.seed, "size": self.order.size}
        torch.save(place, folder / "data.pt")


def _batch(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The daemon's columns: one, whose entries are whole rows."""
    column = np.empty(len(rows), dtype=object)
    column[:] = list(rows)
    return {"row": column}
