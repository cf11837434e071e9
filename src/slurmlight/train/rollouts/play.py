"""Play a batch of episodes through the gateway and the pool, and bring back what the trainer learns from.

The embedded engine's counterpart of Agent-Lightning's rollout manager for verl, with what that lacks: a deadline for
everything, retries of what infrastructure lost, and a clear end when too much fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import httpx

from slurmlight.train.rollouts.gateway import Ended, Gateway
from slurmlight.train.rollouts.pool import RunnerPool
from slurmlight.train.rollouts.runner import BLOCKED, TIMEOUT

_POLL_S = 0.03
_TRIES = 2  # an episode that failed for another reason than its own slowness is played once more, with the same seed


class TooManyFailed(RuntimeError):
    """More episodes failed than runner.max_failed_share allows: what is left would not be the batch that was asked for."""


@dataclass(frozen=True)
class Job:
    """One episode to play. ``input`` is the row the player gets (with its ``seed``), ``name`` unique in the attempt."""

    name: str
    input: dict[str, Any]
    learns: bool


@dataclass(frozen=True)
class Call:
    """One learning model call as the model server recorded it; no text was tokenised again."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Played:
    """How a job ended: ``reward`` is None where it failed, and ``error`` then says why.

    ``parts`` is what rollouts.player.Parts says of a composed reward, with the whole one as ``reward``.
    """

    job: Job
    reward: float | None = None
    reason: str = ""
    calls: tuple[Call, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    parts: dict[str, Any] = field(default_factory=dict)


class Playground:
    """Gateway and pool, as one thing that plays batches. ``watch`` is called at every look, to check on other processes."""

    def __init__(
        self, gateway: Gateway, pool: RunnerPool, max_failed_share: float, watch: Callable[[], None] = lambda: None
    ) -> None:
        self.gateway = gateway
        self.pool = pool
        self.max_failed_share = max_failed_share
        self.watch = watch
        self._cursor = 0
        self._cleaner = ThreadPoolExecutor(1)
        self._cleaning = self._cleaner.submit(gateway.api.forget, [])

    def play(self, jobs: Sequence[Job], progress: Callable[[int], None] = lambda ended: None) -> list[Played]:
        """Every job's outcome, in the order of ``jobs``. ``progress`` hears how many have ended.

        Raises TooManyFailed, and ChildEnded where the gateway is gone or every runner dies.
        """
        try:
            return self._play(jobs, progress)
        except httpx.HTTPError as error:
            raise self.gateway.gone(error) from error

    def _play(self, jobs: Sequence[Job], progress: Callable[[int], None]) -> list[Played]:
        self._cleaning.result()
        waiting = {f"{job.name}-1": (job, 1) for job in jobs}
        spent: list[str] = []
        played: dict[str, Played] = {}
        self._enqueue(waiting)
        while waiting:
            for ended in self._ended():
                if ended.name not in waiting:
                    continue
                job, attempt = waiting.pop(ended.name)
                outcome = Played(job, error=ended.error) if ended.error else read_events(job, ended.events)
                spent.append(ended.name)
                if outcome.error and attempt < _TRIES and not outcome.error.startswith((TIMEOUT, BLOCKED)):
                    again = {f"{job.name}-{attempt + 1}": (job, attempt + 1)}
                    waiting |= again
                    self._enqueue(again)
                    continue
                played[job.name] = outcome
                if not outcome.error:
                    self.pool.episode_ended()
                progress(len(played))
        self._cleaning = self._cleaner.submit(self.gateway.api.forget, spent)  # while the trainer computes
        self._judge(list(played.values()))
        return [played[job.name] for job in jobs]

    def _ended(self) -> list[Ended]:
        """Rollouts that ended since the last look; looks after everybody first, and waits a little where none has."""
        self.gateway.check()
        self.watch()
        self.pool.check()
        ended, self._cursor = self.gateway.api.ended(self._cursor)
        if not ended:
            time.sleep(_POLL_S)
        return ended

    def _enqueue(self, waiting: dict[str, tuple[Job, int]]) -> None:
        self.gateway.api.enqueue(
            [{"rollout_id": name, "input": job.input, "is_train": job.learns} for name, (job, _) in waiting.items()]
        )

    def _judge(self, played: list[Played]) -> None:
        failed = [one for one in played if one.error]
        for one in failed[:3]:
            print(f"episode {one.job.name} has no reward: {one.error}", file=sys.stderr, flush=True)
        if len(failed) > self.max_failed_share * len(played):
            raise TooManyFailed(
                f"{len(failed)} of {len(played)} episodes failed (runner.max_failed_share allows {self.max_failed_share:g}); "
                f"the first: {failed[0].error}; mend the cause and start the run again, it resumes from its last checkpoint"
            )


def read_events(job: Job, events: Sequence[dict[str, Any]]) -> Played:
    """The calls and the last reward of one rollout. An episode without a reward or without ids has failed."""
    calls, reward, reason, detail, parts = [], None, "", {}, {}
    for event in events:
        data = event["data"]
        if event["event_type"] == "reward":
            reward, reason = data["value"], data.get("reason") or ""
        elif event["event_type"] == "detail":
            detail = data
        elif event["event_type"] == "parts":
            parts = data
        elif event["event_type"] == "model_request" and data.get("status") == "ok":
            calls.append(
                Call(
                    tuple(data["prompt_token_ids"]),
                    tuple(data["response_token_ids"]),
                    tuple(data["response_log_probs"] or ()),
                )
            )
    if reward is None:
        return Played(job, error="error: the episode ended without a reward")
    if not isfinite(reward):
        return Played(job, error=f"error: the reward is {reward}, which is no number to learn from")
    torn = [call for call in calls if not call.prompt or not call.response or len(call.logprobs) != len(call.response)]
    if job.learns and (torn or not calls):
        return Played(job, error="error: the model server gave no token ids or log-probabilities to learn from")
    return Played(job, float(reward), reason, tuple(calls), detail, parts=parts)
