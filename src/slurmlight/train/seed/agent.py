"""The agent as Agent-Lightning 0.3 wants it: a LitAgent around the same player, with its own time-outs.

Which calls train is the adapter's choice by node name (``agent_match``); names are in the spans only where the graph runs
with AgentOps' LangChain handler. Without it a rollout would give no row and no error.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentlightning import LitAgent, emit_exception
from langchain_core.runnables.config import var_child_runnable_config

from slurmlight.agents import chat
from slurmlight.agents.contract import Channel, Endpoint, Sampling
from slurmlight.presets import Preset
from slurmlight.train.rollouts.player import Player, load_player
from slurmlight.train.seed.traced import TracedClient

GRACE_S = 20.0  # an episode that blocks its runner ends with the runner, so long after its time-out


def learning_nodes(preset: Preset) -> str:
    """The pattern of the graph nodes whose calls train the policy."""
    return f"^({'|'.join(preset.agent.learn)})$"


class PlayerAgent(LitAgent[dict[str, Any]]):
    """Plays the rows that the daemon enqueues. Made before the runners are forked; each makes its own player."""

    def __init__(self, preset: Preset, player: str) -> None:
        super().__init__()
        self.preset, self.player_name = preset, player
        self.player: Player | None = None

    async def rollout_async(self, task: dict[str, Any], resources: Any, rollout: Any) -> float:
        """The episode's reward. Whatever fails fails the rollout: never a reward of 0, and the reason is in its spans."""
        limit = self.preset.runner.rollout_timeout_s
        scope = asyncio.timeout(limit)
        try:
            with self._traced(), _alarm(limit + GRACE_S):
                async with scope:
                    score = await self._player()(task["row"], self._endpoint(resources["main_llm"], rollout))
        except Exception as error:
            told = TimeoutError(f"no answer within {limit:g} s") if scope.expired() else error
            print(f"episode {rollout.rollout_id} failed: {told!r}"[:500], file=sys.stderr, flush=True)
            emit_exception(told)
            raise
        if score.parts is not None and rollout.mode != "train":  # validation reports execution match, whatever pays
            return float(score.parts.plain)
        return float(score.reward)

    def _player(self) -> Player:
        if self.player is None:
            chat.client_class = TracedClient
            self.player = load_player(self.player_name, self.preset)
        return self.player

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Graphs that are invoked inside inherit the handler that writes node names into spans."""
        handler = self.tracer.get_langchain_handler()
        handler.run_inline = True  # in a thread of its own a node's span would not be current where the node calls the model
        token = var_child_runnable_config.set({"callbacks": [handler]})
        try:
            yield
        finally:
            var_child_runnable_config.reset(token)

    def _endpoint(self, llm: Any, rollout: Any) -> Endpoint:
        """Both channels are the proxy's URL of this rollout: here the node decides what trains, not the URL."""
        preset = self.preset
        url = f"{llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)}/v1"
        channel = Channel(url, "none", llm.model)
        temperature = preset.actor_rollout_ref.rollout.temperature if rollout.mode == "train" else 0.0
        sampling = Sampling(temperature, preset.data.max_response_length)
        return Endpoint(channel, channel, sampling, preset.runner.rollout_timeout_s)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """SIGALRM's default action ends a process whose event loop no longer turns; the nurse replaces it."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
