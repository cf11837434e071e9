"""Runs of the seed engine on a CPU: a random policy, a few questions, and an agent whose reward depends on every token.

python -m tests.seedbed RUN_FOLDER    trains that run as slurmlight.train.main would, with this player and watched weights

The agent is a graph write -> check -> rewrite whose check does not learn. A row's ``trouble`` makes its episodes raise, hang,
block or kill their runner. What seedprobe.py writes and takes is in the run folder too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from slurmlight.agents.chat import complete
from slurmlight.agents.contract import Endpoint
from slurmlight.presets import Preset
from slurmlight.train.rollouts.player import Score
from tests import trainbed

PLAYER = "tests.seedbed:make"
SETTINGS = (
    "engine.name=verl",
    "engine.stack=seed",
    "actor_rollout_ref.rollout.name=vllm",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "trainer.total_training_steps=3",
    "trainer.test_freq=3",
    "trainer.save_freq=2",
    "runner.n_runners=2",
)


class State(TypedDict):
    llm: Any
    question: str
    said: list[str]


class ThreeNodes:
    """Two learning calls and one that does not; the reward counts the answers' characters."""

    def __init__(self) -> None:
        from langgraph.graph import END, START, StateGraph

        graph = StateGraph(State)
        names = ("write", "check", "rewrite")
        for number, name in enumerate(names):
            graph.add_node(name, _node(number, name))
        for one, two in zip((START, *names), (*names, END), strict=True):
            graph.add_edge(one, two)
        self.graph = graph.compile()

    async def __call__(self, row: Mapping[str, Any], llm: Endpoint) -> Score:
        await _trouble(row)
        end = await self.graph.ainvoke({"llm": llm, "question": row["question"], "said": []})
        return Score(float(sum(map(len, (end["said"][0], end["said"][2]))) % 2))


def _node(number: int, name: str) -> Any:
    async def call(state: State) -> dict[str, Any]:
        text = state["question"] if name == "write" else f"{state['question']} again" if name == "rewrite" else "was it right?"
        reply = await complete(state["llm"], name != "check", [{"role": "user", "content": text}], number)
        return {"said": [*state["said"], reply.text]}

    return call


async def _trouble(row: Mapping[str, Any]) -> None:
    match row.get("trouble"):
        case "hang":
            await asyncio.sleep(3600)
        case "raise":
            raise RuntimeError("no cats here")
        case "block":
            time.sleep(3600)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)


def make(_: Preset) -> ThreeNodes:
    return ThreeNodes()


def make_run(folder: Path, name: str = "run", overrides: Iterable[str] = ()) -> Path:
    return trainbed.make_run(folder, name, (*SETTINGS, *overrides))


def main() -> int:
    from slurmlight.train import main as payload
    from slurmlight.train.seed.cpu_lane import shims

    os.environ["SEEDBED_RUN"] = sys.argv[1]
    shims._SHIMS["slurmlight.train.seed.start"] = _probe
    payload._engine = _engine
    return payload.main(sys.argv[1:])


def _probe(start: Any) -> None:
    from tests.seedprobe import ProbedWorker

    start.SeedWorker = ProbedWorker


def _engine(_: Any) -> Any:
    from slurmlight.train.seed.engine import SeedEngine

    return SeedEngine(PLAYER)


if __name__ == "__main__":
    sys.exit(main())
