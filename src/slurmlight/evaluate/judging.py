"""Verdicts of both evaluators on an episode's first and final query, in processes that can be killed."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from slurmlight.agents.contract import Episode, SqlTask
from slurmlight.evaluate.store import Answer
from slurmlight.rewards.pairs import Pair
from slurmlight.rewards.score import Scored, judge
from slurmlight.sql.execute import Limits
from slurmlight.sql.hardness import hardness
from slurmlight.sql.worker import Worker

FEEDBACK_CHARS = 300  # of an error message kept in the trace


@dataclass(frozen=True)
class Judged:
    strict: Scored
    official: Scored


class Judges:
    """``with Judges(n, limits) as judges``: n processes; ``await judges.answer(...)`` from one event loop."""

    def __init__(self, processes: int, limits: Limits) -> None:
        self.processes, self.limits = processes, limits

    def __enter__(self) -> Judges:
        self._stack = ExitStack()
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(self.processes):
            self._idle.put(self._stack.enter_context(Worker()))
        self._threads = ThreadPoolExecutor(self.processes, thread_name_prefix="judge")
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._stack.close()

    async def answer(self, key: tuple[int, int], task: SqlTask, episode: Episode, attempt: int) -> Answer:
        """The row of an episode: its verdicts and what a report needs of it."""
        final, first = episode.answer, first_query(episode)
        queries = [final] if final == first else [final, first]
        loop = asyncio.get_running_loop()
        judged = await loop.run_in_executor(self._threads, self._judge, task, queries)
        return _row(key, task, episode, judged[0], judged[-1], attempt)

    def _judge(self, task: SqlTask, queries: list[str]) -> list[Judged]:
        databases = [task.database, *map(Path, task.extra.get("instances", []))]
        worker = self._idle.get()
        try:
            pairs = [Pair(0, task.db_id, task.gold, query) for query in queries]
            return [
                Judged(
                    judge(worker, pair, databases, "strict", self.limits, False),
                    judge(worker, pair, databases, "official", self.limits, False),
                )
                for pair in pairs
            ]
        finally:
            self._idle.put(worker)


def first_query(episode: Episode) -> str:
    """What the agent would have answered without its check and rewrite loop."""
    return next((turn.sql for turn in episode.turns if turn.node == "write"), "")


def _row(key: tuple[int, int], task: SqlTask, episode: Episode, final: Judged, first: Judged, attempt: int) -> Answer:
    verdict = final.strict.verdict
    return Answer(
        index=key[0],
        sample=key[1],
        question=task.question,
        db_id=task.db_id,
        gold=task.gold,
        hardness=hardness(task.gold),
        answer=episode.answer,
        first=first_query(episode),
        strict=_score(final.strict),
        official=_score(final.official),
        first_strict=_score(first.strict),
        first_official=_score(first.official),
        outcome=verdict.kind if verdict else "",
        error=verdict.error if verdict else "",
        reason=verdict.reason if verdict else final.strict.reason,
        vacuous=bool(verdict and verdict.vacuous and verdict.score),
        unscorable=final.strict.unscorable or final.official.unscorable,
        turns=sum(turn.node != "check" for turn in episode.turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in episode.turns),
        completion_tokens=sum(turn.completion_tokens for turn in episode.turns),
        seconds=round(episode.seconds, 4),
        trace=trace(episode),
        attempt=attempt,
    )


def trace(episode: Episode) -> str:
    """The turns as JSON: node, sql, outcome, message."""
    turns = [
        {"node": turn.node, "sql": turn.sql, "outcome": turn.outcome, "message": turn.message[:FEEDBACK_CHARS]}
        for turn in episode.turns
    ]
    return json.dumps(turns)


def _score(scored: Scored) -> int | None:
    return scored.verdict.score if scored.verdict else None
