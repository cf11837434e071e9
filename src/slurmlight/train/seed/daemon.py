"""Agent-Lightning 0.3's rollout daemon, made finite and honest: it waits only while runners and proxy live, failed episodes
never train, and what will be dropped is dropped before the advantages are computed."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from agentlightning.semconv import AGL_EXCEPTION
from agentlightning.verl.daemon import AgentModeDaemon

from slurmlight.train.rollouts.play import TooManyFailed
from slurmlight.train.seed.hooks import Hooks, Rules
from slurmlight.train.seed.rows import whole_mini_batches

POLL_S = 0.1


class NothingToLearn(RuntimeError):
    """The step's episodes give no whole mini batch of rows."""


class Daemon(AgentModeDaemon):
    """``guard`` it before use. Its methods are called in the trainer's thread, its coroutines run in a thread of its own."""

    def guard(self, rules: Rules, hooks: Hooks, progress: Callable[[str], None]) -> Daemon:
        self.rules, self.hooks, self.progress = rules, hooks, progress
        self.llm_timeout_seconds = rules.timeout_s  # after that the store gives an episode up
        self.failed, self.failures = 0, {}
        return self

    def close(self) -> None:
        """End the LLM proxy."""
        loop = self._internal_loop
        if loop is not None and self.llm_proxy.is_running():
            with contextlib.suppress(Exception):  # it is on a leash besides
                asyncio.run_coroutine_threadsafe(self.llm_proxy.stop(), loop).result(30)

    async def _async_run_until_finished(self, verbose: bool = True) -> None:
        """Raises TooManyFailed, and what ``hooks.alive`` raises."""
        waiting, total = set(self._task_id_to_original_sample), len(self._task_id_to_original_sample)
        self.failures: dict[str, str] = {}
        while waiting:
            for death in self.hooks.alive():
                await self._bury(death.worker, death.how, waiting)
            ended = await self.store.wait_for_rollouts(rollout_ids=list(waiting), timeout=0)
            for rollout in ended:
                waiting.discard(rollout.rollout_id)
                await self._collect(rollout)
            self.progress(f"{total - len(waiting)}/{total} episodes")
            if not ended:
                await asyncio.sleep(POLL_S)
        self._judge(total)

    async def _bury(self, worker: str, how: str, waiting: set[str]) -> None:
        """Fail the episode that a dead runner had."""
        known = await self.store.get_worker_by_id(worker)
        rollout, attempt = (known.current_rollout_id, known.current_attempt_id) if known else (None, None)
        if rollout in waiting:
            self.failures[rollout] = f"lost: {worker} {how}"
            await self.store.update_attempt(rollout, attempt, status="failed")

    async def _collect(self, rollout: Any) -> None:
        """Keep an episode that can be learned from or scored; note why another cannot."""
        name = rollout.rollout_id
        if rollout.status == "succeeded":
            self.hooks.episode_ended()
            played = await self._validate_data_v1(rollout)
            calls = played.triplets or []
            if played.final_reward is not None and calls and all(map(_whole, calls)):
                self._completed_rollouts_v0[name] = played
                self.failures.pop(name, None)  # its runner died when all was told
                return
            self.failures[name] = "no call of a learning node with token ids and a reward was recorded"
        elif name not in self.failures:
            spans = await self.store.query_spans(name)
            raised = [span.attributes for span in spans if span.name == AGL_EXCEPTION]
            told = f"{raised[-1]['exception.type']}: {raised[-1]['exception.message']}" if raised else f"{rollout.status}"
            self.failures[name] = told[:500]

    def _judge(self, total: int) -> None:
        """Take failed episodes out of the batch."""
        self.failed = len(self.failures)
        self._total_tasks_queued -= self.failed
        if not self.failures:
            return
        first = next(iter(self.failures.values()))
        print(f"{self.failed} of {total} episodes have no reward, the first: {first}", flush=True)
        if self.failed > self.rules.max_failed_share * total:
            raise TooManyFailed(f"{self.failed} of {total} episodes failed, the first: {first}")

    def get_train_data_batch(self, max_prompt_length: int, max_response_length: int, device: Any, global_steps: int) -> Any:
        """Rows of calls (transition level) or merged ones, a multiple of the mini batch. Raises NothingToLearn."""
        self.hooks.beat(global_steps, "update", "")
        played = self._completed_rollouts_v0
        calls = sum(len(one.triplets) for one in played.values())
        merged = self.trace_aggregator.get("level", "transition") != "transition"  # later prompts are parts of a row then
        for one in () if merged else played.values():
            one.triplets = [call for call in one.triplets if len(call.prompt["token_ids"]) <= max_prompt_length]
        fitting = sum(len(one.triplets) for one in played.values())
        if not fitting:
            raise NothingToLearn(f"no call of the {len(played)} episodes fits data.max_prompt_length={max_prompt_length}")
        batch, metrics = super().get_train_data_batch(max_prompt_length, max_response_length, device, global_steps)
        groups = batch.non_tensor_batch["data_id_list"].tolist()
        scores = batch.batch["token_level_scores"].sum(-1).tolist()
        kept = whole_mini_batches(groups, scores, self.mini_batch_size)
        if not kept:
            raise NothingToLearn(f"{len(groups)} rows are fewer than ppo_mini_batch_size={self.mini_batch_size}")
        equal = {group: {score for other, score in zip(groups, scores, strict=True) if other == group} for group in groups}
        metrics |= {
            "training/n_turns": calls,
            "training/n_triplets_too_long": calls - fitting,
            "training/n_failed_rollouts": self.failed,
            "training/n_groups": len(equal),
            "training/n_zero_adv_groups": sum(len(found) == 1 for found in equal.values()),
            "training/n_triplets_surplus": len(groups) - len(kept),
            "training/n_sample_trained": len(kept),
        }
        return batch[kept], metrics


def _whole(call: Any) -> bool:
    return bool(call.prompt.get("token_ids")) and bool(call.response.get("token_ids"))
