"""One question through the agent of a run, every step shown: for a person who wants to try a model."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from slurmlight.agents.chat import close_clients
from slurmlight.agents.contract import Endpoint, Episode, InfrastructureError, Sampling, SqlTask
from slurmlight.evaluate.config import EvalConfig
from slurmlight.evaluate.run import make_agent
from slurmlight.evaluate.serve import Servers, serving
from slurmlight.evaluate.subject import Subject, find
from slurmlight.sql.execute import Limits, Result, execute
from slurmlight.train.rollouts.children import ChildEnded

ROWS = 20  # of the answer's result that are shown


def ask(config: EvalConfig, database: Path, question: str) -> int:
    """Print the steps and the answer's rows. Returns 0, or 1 where no answer came. Raises UserError."""
    label, model, step = find(config)
    subject = Subject(label, model, step, 1, "", "")
    agent = config.training().agent
    task = SqlTask("ask", question, database.stem, database, "", agent.max_turns, agent.query_timeout_s)
    with tempfile.TemporaryDirectory(prefix="sl-ask-") as logs:
        try:
            with serving(config, subject, Path(logs)) as servers:
                episode = asyncio.run(_solve(config, servers, task))
        except (InfrastructureError, ChildEnded) as error:
            print(f"slurmlight: {error}", file=sys.stderr)
            return 1
    print(f"model: {label}")
    for line in steps(episode):
        print(line)
    if not episode.answer:
        print("no answer")
        return 1
    for line in rows(execute(database, episode.answer, Limits(timeout_s=agent.query_timeout_s))):
        print(line)
    return 0


async def _solve(config: EvalConfig, servers: Servers, task: SqlTask) -> Episode:
    preset = config.training()
    sampling = Sampling(config.temperature, preset.data.max_response_length)
    try:
        with servers.borrow() as channel:
            return await make_agent(preset).solve(task, Endpoint(channel, channel, sampling, preset.runner.rollout_timeout_s))
    finally:
        await close_clients()


def steps(episode: Episode) -> list[str]:
    """One line a turn: what was done, the query, what came of it. Nothing that a model wrote may steer a terminal."""
    lines = []
    for number, turn in enumerate(episode.turns, 1):
        said = turn.sql or turn.completion
        came = turn.outcome + (f" ({turn.message})" if turn.message else "")
        lines.append(f"{number}. {turn.node:8}{printable(said)}" + (f"\n   -> {printable(came)}" if came else ""))
    return lines


def rows(result: Result) -> list[str]:
    """The result as a person reads it, or why there is none."""
    if result.kind != "rows":
        return [f"no rows: {printable(result.message)}"]
    lines = [" | ".join(map(printable, result.columns))]
    lines += [" | ".join(printable(str(value)) for value in row) for row in result.rows[:ROWS]]
    return [*lines, f"({len(result.rows)} rows)"]


def printable(text: str) -> str:
    shown = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return shown if len(shown) <= 2000 else shown[:2000] + " ..."
