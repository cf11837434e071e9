"""Agent-Lightning's Trainer with this kit's parts: nursed runners, a leashed proxy, and an algorithm that is our attempt."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.algorithm.base import Algorithm
from agentlightning.store.memory import InMemoryLightningStore

from slurmlight.presets import Preset
from slurmlight.train.engine import Outcome
from slurmlight.train.rollouts.children import ChildEnded
from slurmlight.train.seed.agent import PlayerAgent, learning_nodes
from slurmlight.train.seed.failure import noted
from slurmlight.train.seed.hooks import Death
from slurmlight.train.seed.proxy import LeashedProxy
from slurmlight.train.seed.runners import NursedRunners

STORE_BYTES = 2 << 30  # spans of old episodes go beyond that; by default they may take 70 % of the machine, not of the job
POLL_S = 0.5  # a runner without an episode asks the store so often

# (store, adapter) -> how training ended
Attempt = Callable[[Any, Any], Outcome]


class Parts:
    """The processes around an attempt. ``port`` is the store's, ``logs`` the attempt's folder."""

    def __init__(self, preset: Preset, player: str, logs: Path, port: int, scratch: Path) -> None:
        self.preset, self.player, self.scratch = preset, player, scratch
        self.runners = NursedRunners(preset.runner.n_runners, port, logs)
        self.proxy = LeashedProxy(logs / "proxy.log")

    def alive(self) -> list[Death]:
        """The runners that died and were replaced. Raises ChildEnded where the attempt cannot go on."""
        self.check_worker()
        self.proxy.check()
        return self.runners.check()

    def check_worker(self) -> None:
        """Raises ChildEnded where a vLLM worker of this machine failed."""
        if told := noted(self.scratch):
            raise ChildEnded(f"{told}; start the run again, it resumes from its last checkpoint")


class VerlAttempt(Algorithm):
    """In the place of ``agl.VERL``: the same run, in this process instead of a Ray actor's.

    Its end is kept, also an error's: Agent-Lightning takes an interrupt for success and prints an error four times over.
    """

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.attempt = attempt
        self.end: Outcome | BaseException = RuntimeError("Agent-Lightning ended before training began")

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        try:
            self.end = self.attempt(self.get_store(), self.get_adapter())
        except BaseException as error:
            self.end = error


def run(parts: Parts, attempt: Attempt) -> Outcome:
    """Raises what ``attempt`` raises."""
    algorithm = VerlAttempt(attempt)
    tracer = agl.AgentOpsTracer()
    store = InMemoryLightningStore(
        thread_safe=True, eviction_memory_threshold=STORE_BYTES, safe_memory_threshold=STORE_BYTES // 2
    )
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=store,
        strategy=parts.runners,
        llm_proxy=parts.proxy,
        adapter={"agent_match": learning_nodes(parts.preset)},
        tracer=tracer,
        runner=agl.LitAgentRunner(tracer, poll_interval=POLL_S, interval_jitter=POLL_S / 5),
    )
    trainer.fit(PlayerAgent(parts.preset, parts.player))
    if isinstance(algorithm.end, BaseException):
        parts.check_worker()  # the first cause, where the end is only its consequence
        raise algorithm.end
    return algorithm.end
