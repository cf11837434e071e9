"""The verl engine's rollouts: Agent-Lightning's manager, made finite and quick, and what the trainer tells and asks."""

# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.schemas import Event, Rollout, RolloutConfig, RolloutCreate, RolloutState
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout, EnqueuedRollout

from slurmlight.presets.learning import CreditSection
from slurmlight.train import keeper
from slurmlight.train.rollouts.gateway import Ended
from slurmlight.train.rollouts.play import TooManyFailed
from slurmlight.train.rollouts.runner import BLOCKED, TIMEOUT

POLL_S = 0.05
RETRIES = 2  # of a call to the gateway, which is on this machine (2 + 4 s); Agent-Lightning's ten take minutes to see it dead
AGAIN = "-again"  # ends the name of an episode's second try


@dataclass(frozen=True, kw_only=True)
class Hooks(keeper.Hooks):
    """All are called in the trainer's own thread."""

    alive: Callable[[], None]  # called several times a second; raises where gateway or runners are beyond help
    ended: Callable[[], Iterable[Ended]]  # the episodes that ended since the last call
    forget: Callable[[Sequence[str]], None]  # rollouts that the gateway need not keep any more


@dataclass(frozen=True)
class Rules:
    """``seed`` is of the row choice; ``max_failed_share`` ends the attempt."""

    seed: int
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
        total, done, spent, looked = len(waiting), [], [], 0.0
        while waiting:
            self.hooks.alive()
            ended = [one for one in self.hooks.ended() if one.name in waiting]
            for one in ended:
                spent.append(one.name)
                enqueued = waiting.pop(one.name)
                if one.error and not one.name.endswith(AGAIN) and not one.error.startswith((TIMEOUT, BLOCKED)):
                    again = self._enqueue_again(enqueued, one.error, is_train=is_train)
                    waiting[again.rollout_id] = again
                else:
                    done.append(self._collect(enqueued, one))
            self.progress(f"{len(done)}/{total} episodes")
            if time.monotonic() - looked > 1:
                self._look_at_running(waiting)
                looked = time.monotonic()
            if not ended:
                time.sleep(POLL_S)
        self.hooks.forget(spent)
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

    def _enqueue_again(self, enqueued: EnqueuedRollout, why: str, *, is_train: bool) -> EnqueuedRollout:
        """A failed episode is played once more, as the embedded engine does: a missing row may cost a whole mini batch."""
        print(f"episode {enqueued.rollout_id} is played again: {why}", flush=True)
        name, config = f"{enqueued.rollout_id}{AGAIN}", RolloutConfig.model_validate(self._rollout_config)
        request = RolloutCreate(rollout_id=name, input=enqueued.input, is_train=is_train, config=config)
        self.client.post_with_retry("/api/rollouts", json=[request.model_dump(mode="json", exclude_none=True)])
        return enqueued.model_copy(update={"rollout_id": name, "running_at": None})

    def _look_at_running(self, waiting: Mapping[str, EnqueuedRollout]) -> None:
        """When did they begin to run (for the queue's metrics)?"""
        answer = self.client.get("/api/rollouts", params={"state_in": "running", "limit": 100_000}).raise_for_status()
        for rollout in map(Rollout.model_validate, answer.json()):
            if rollout.rollout_id in waiting:
                self._record_lifecycle_timestamps(waiting[rollout.rollout_id], rollout)

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
