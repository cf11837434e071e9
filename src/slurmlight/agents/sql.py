"""The SQL agent: a LangGraph graph write -> execute -> (END | check -> (END | rewrite -> execute ...)).

    episode = await SqlAgent(SqlAgentConfig()).solve(task, endpoint)

The graph is compiled once and shared by all episodes. What cannot be blamed on the model raises InfrastructureError.
"""

from __future__ import annotations

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypedDict

from langgraph.graph import END, START, StateGraph

from slurmlight.agents.chat import Reply, complete
from slurmlight.agents.contract import Endpoint, Episode, InfrastructureError, PromptTooLong, SqlTask, Turn
from slurmlight.agents.parse import parse
from slurmlight.agents.prompts import Message, Prompts
from slurmlight.errors import UserError
from slurmlight.sql.execute import Limits, Result, execute

Node = Literal["write", "check", "rewrite"]
QUERY_THREADS = 16  # queries of one process at a time; a thread is busy for the query's time limit at most


@dataclass(frozen=True)
class SqlAgentConfig:
    """``check``: a rule (an error or an empty result is not good enough) or the model decides whether to rewrite.

    ``learn`` names the calls that go to the learning channel. ``prompt`` and ``max_prompt_tokens``: see ``Prompts``.
    Turns and the time limit of a query are the task's.
    """

    check: Literal["rule", "model"] = "model"
    learn: tuple[Node, ...] = ("write", "rewrite")
    prompt: Literal["full", "compact"] = "full"
    max_prompt_tokens: int = 4096


@dataclass
class Play:
    """One episode while it is played."""

    task: SqlTask
    llm: Endpoint
    context: str
    turns: list[Turn] = field(default_factory=list)
    attempts: int = 0
    sql: str = ""
    feedback: str = ""
    result: Result | None = None  # of ``sql``; None where there was no query
    answer: str = ""
    answer_ran: bool = False
    accepted: bool = False  # by the model's check


class State(TypedDict):
    play: Play


class SqlAgent:
    """Plays episodes; safe to share between any number of concurrent ones in one event loop."""

    def __init__(self, config: SqlAgentConfig = SqlAgentConfig()) -> None:
        self.config = config
        self.prompts = Prompts(compact=config.prompt == "compact", max_tokens=config.max_prompt_tokens)
        self.graph = self._build()

    async def solve(self, task: SqlTask, llm: Endpoint) -> Episode:
        """Raises InfrastructureError: no schema, no database, no completion. A wrong query is an answer like any other."""
        start = time.monotonic()
        play = Play(task, llm, self.prompts.context(task))
        try:
            await self.graph.ainvoke({"play": play}, {"recursion_limit": 3 * task.max_turns + 5})
        except PromptTooLong:
            if not play.turns:
                raise
            # no room to tell of the last attempt: what was answered so far stands
        return Episode(task, play.answer, tuple(play.turns), time.monotonic() - start)

    def _build(self) -> Any:
        graph = StateGraph(State)
        graph.add_node("write", self._write)
        graph.add_node("execute", self._execute)
        graph.add_node("check", self._check)
        graph.add_node("rewrite", self._rewrite)
        graph.add_edge(START, "write")
        graph.add_edge("write", "execute")
        graph.add_conditional_edges("execute", self._after_execution, ["check", "rewrite", END])
        graph.add_conditional_edges("check", _after_check, ["rewrite", END])
        graph.add_edge("rewrite", "execute")
        return graph.compile()

    async def _write(self, state: State) -> State:
        play = state["play"]
        await self._attempt(play, "write", self.prompts.write(play.context))
        return state

    async def _rewrite(self, state: State) -> State:
        play = state["play"]
        await self._attempt(play, "rewrite", self.prompts.rewrite(play.context, play.sql, play.feedback))
        return state

    async def _attempt(self, play: Play, node: Node, messages: list[Message]) -> None:
        reply = await self._call(play, node, messages)
        parsed = parse(reply.text)
        play.attempts += 1
        play.sql, play.result = parsed.sql, None
        play.feedback = self.prompts.tell_no_query(parsed.failure)
        play.turns.append(self._turn(node, messages, reply, sql=parsed.sql, message=parsed.failure))

    async def _execute(self, state: State) -> State:
        """Run the query, tell of it, and keep the best answer so far: the last query that ran, else the last one."""
        play = state["play"]
        if not play.sql:
            return state
        play.result = result = await _run(play.task, play.sql)
        play.feedback = self.prompts.tell(result)
        play.turns[-1] = _with_outcome(play.turns[-1], result)
        ran = result.kind == "rows"
        if ran or not play.answer_ran:
            play.answer, play.answer_ran = play.sql, ran
        return state

    def _after_execution(self, state: State) -> str:
        """Only a result can be reviewed, and the last attempt is not: its verdict could change nothing."""
        play = state["play"]
        if play.attempts >= play.task.max_turns:
            return END
        if play.result is None or play.result.kind != "rows":
            return "rewrite"
        if self.config.check == "model":
            return "check"
        return END if play.result.rows else "rewrite"

    async def _check(self, state: State) -> State:
        play = state["play"]
        messages = self.prompts.check(play.context, play.sql, play.feedback)
        reply = await self._call(play, "check", messages)
        play.turns.append(self._turn("check", messages, reply))
        correct = verdict(reply.text)
        if correct is None:  # no verdict: the rule decides
            correct = bool(play.result and play.result.rows)
        play.accepted = correct
        play.feedback = self.prompts.tell_review(play.feedback, reply.text)
        return state

    async def _call(self, play: Play, node: Node, messages: list[Message]) -> Reply:
        return await complete(play.llm, node in self.config.learn, messages, len(play.turns))

    def _turn(self, node: Node, messages: list[Message], reply: Reply, **more: str) -> Turn:
        return Turn(
            node=node,
            learns=node in self.config.learn,
            prompt=messages,
            completion=reply.text,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            seconds=reply.seconds,
            **more,
        )


def _after_check(state: State) -> str:
    return END if state["play"].accepted else "rewrite"


_VERDICT = re.compile(r"\bTHE\s+QUERY\s+IS\s+(IN|NOT\s+)?CORRECT\b", re.IGNORECASE)


def verdict(review: str) -> bool | None:
    """The last verdict in a review; None where it gives none."""
    found = _VERDICT.findall(review)
    return not found[-1] if found else None


def _with_outcome(turn: Turn, result: Result) -> Turn:
    outcome = "empty" if result.kind == "rows" and not result.rows else result.kind
    return replace(turn, outcome=outcome, message=result.message)


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(QUERY_THREADS, thread_name_prefix="sql")


async def _run(task: SqlTask, sql: str) -> Result:
    """Execute in a thread, so that a slow query of one episode holds up no other."""
    limits = Limits(timeout_s=task.query_timeout_s)
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads(), execute, task.database, sql, limits)
    except UserError as error:  # DatabaseMissing, DatabaseBroken: the task is at fault
        raise InfrastructureError(f"task {task.task_id}: {error}") from error
