"""Agent-Lightning's trainer for verl, with this kit's life cycle around its step: stop, save, resume, liveness, heartbeat."""

# pyright: reportMissingImports=false

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agentlightning.schemas import Event, Rollout, RolloutState
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout, EnqueuedRollout
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.utils.profiler.performance import marked_timer

from slurmlight.presets.learning import CreditSection
from slurmlight.train.checkpoints import Resume
from slurmlight.train.engine import Outcome
from slurmlight.train.parts import part_metrics
from slurmlight.train.rollouts.gateway import Ended
from slurmlight.train.rollouts.play import TooManyFailed
from slurmlight.train.verl import credit

MAX_EMPTY_STEPS = 3  # steps in a row without a usable row before the attempt ends
POLL_S = 0.05
RETRIES = 2  # of a call to the gateway, which is on this machine (2 + 4 s); Agent-Lightning's ten take minutes to see it dead
GRACE_S = 30.0  # beyond an episode's time-out, which its runner enforces


@dataclass(frozen=True)
class Hooks:
    """What the trainer tells and asks. All are called in the trainer's own thread."""

    beat: Callable[[int, str, str], None]  # step, phase, note
    log: Callable[[int, dict[str, Any]], None]  # step, verl's metrics of that step
    stop: Callable[[], bool]
    alive: Callable[[], None]  # called several times a second; raises where gateway or runners are beyond help
    ended: Callable[[], Iterable[Ended]]  # the episodes that ended since the last call
    episode_ended: Callable[[], None]  # one succeeded: the runners work
    forget: Callable[[Sequence[str]], None]  # rollouts that the gateway need not keep any more
    save: Callable[[int, Callable[[Path], None]], None]  # step, writer of a folder


@dataclass(frozen=True)
class Rules:
    """``seed`` is of the row choice; ``max_failed_share`` ends the attempt; ``timeout_s`` is an episode's."""

    seed: int
    timeout_s: float
    max_failed_share: float
    validate_first: bool
    credit: CreditSection


class Rollouts(AglRolloutManager):
    """Agent-Lightning's manager, made finite and quick: it waits only while runners live, failed episodes never train, and
    it asks the gateway what has ended instead of asking after every open episode in turn."""

    def guard(self, rules: Rules, hooks: Hooks, progress: Callable[[str], None], told: list[dict[str, Any]]) -> None:
        """``told`` gets what each episode says of the parts of its reward."""
        self.rules, self.hooks, self.progress, self.told = rules, hooks, progress, told
        self.failed = 0
        self.client.max_retries = RETRIES

    def enqueue_and_wait_until_completed(self, data: dict[str, Any], *, is_train: bool) -> list[CompletedRollout]:
        """The episodes that can be learned from or scored. Raises TooManyFailed."""
        waiting = {one.rollout_id: one for one in self._create_rollouts(data, is_train=is_train)}
        total, done, looked = len(waiting), [], 0.0
        while waiting:
            self.hooks.alive()
            ended = [one for one in self.hooks.ended() if one.name in waiting]
            done += [self._collect(waiting.pop(one.name), one) for one in ended]
            self.progress(f"{len(done)}/{total} episodes")
            if time.monotonic() - looked > 1:
                self._look_at_running(waiting)
                looked = time.monotonic()
            if not ended:
                time.sleep(POLL_S)
        self.hooks.forget([one.rollout_id for one in done])
        return self._good(done)

    def _collect(self, enqueued: EnqueuedRollout, ended: Ended) -> CompletedRollout:
        rollout = Rollout.model_validate(ended.rollout)
        self._record_lifecycle_timestamps(enqueued, rollout)
        self.events = [Event.model_validate(event) for event in ended.events]
        completed = self._build_completed_rollout(enqueued, rollout)
        if completed.rollout_state == RolloutState.SUCCEEDED:
            self.hooks.episode_ended()
        return completed

    def _fetch_rollout_events(self, rollout_id: str) -> tuple[list[Event], list[Event]]:
        """Those that came with the rollout's end. Not the raw ones: they hold every message once more, for pictures only."""
        return [], self.events

    def _look_at_running(self, waiting: Mapping[str, EnqueuedRollout]) -> None:
        """When did they begin to run (for the queue's metrics), and does one run long after its time-out?"""
        answer = self.client.get("/api/rollouts", params={"state_in": "running", "limit": 100_000}).raise_for_status()
        for rollout in map(Rollout.model_validate, answer.json()):
            if rollout.rollout_id not in waiting:
                continue
            self._record_lifecycle_timestamps(waiting[rollout.rollout_id], rollout)
            if time.time() - rollout.status.updated_at > self.rules.timeout_s + GRACE_S:
                status = {"state": "failed", "error_message": "lost: no answer long after the time-out"}
                self.client.patch(f"/api/rollouts/{rollout.rollout_id}", json={"status": status})

    def _good(self, done: list[CompletedRollout]) -> list[CompletedRollout]:
        good = [one for one in done if one.rollout_state == RolloutState.SUCCEEDED and one.final_reward is not None]
        self.failed = len(done) - len(good)
        self.told += [event["data"] for one in good for event in one.triplet_events if event["event_type"] == "parts"]
        first = next((one.error_message for one in done if one.error_message), "no reason given")
        if self.failed:
            print(f"{self.failed} of {len(done)} episodes have no reward, the first: {first}", flush=True)
        if self.failed > self.rules.max_failed_share * len(done):
            raise TooManyFailed(f"{self.failed} of {len(done)} episodes failed, the first: {first}")
        return good


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
