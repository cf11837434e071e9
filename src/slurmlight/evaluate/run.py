"""Ask the open questions: many episodes of the training agent in flight, every answer judged and stored as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from slurmlight.agents.chat import close_clients
from slurmlight.agents.contract import Endpoint, Episode, InfrastructureError, Sampling, SqlTask
from slurmlight.agents.sql import SqlAgent, SqlAgentConfig
from slurmlight.evaluate.config import EvalConfig
from slurmlight.evaluate.judging import Judges
from slurmlight.evaluate.serve import Servers
from slurmlight.evaluate.store import Key, Store
from slurmlight.presets import Preset
from slurmlight.secrets import redact
from slurmlight.train.rollouts.children import ChildEnded

TRIES = 3  # of an episode that infrastructure lost
PAUSE_S = 1.0  # before the second try; twice as long before the third
TICK_S = 0.2
PART_S, PART_ROWS = 2.0, 256  # answers wait for their part no longer than this, a kill loses no more
GONE_AFTER = 16  # episodes lost in a row, each after all its tries: nobody serves any more


@dataclass
class Progress:
    """What happened in this attempt. ``failed`` holds why infrastructure lost an episode, after all its tries."""

    answered: int = 0
    failed: dict[Key, str] = field(default_factory=dict)
    in_a_row: int = 0


class Harness:
    """One attempt at the open episodes. ``stop`` is asked and ``saved`` called (after every part) several times a second."""

    def __init__(
        self,
        config: EvalConfig,
        tasks: Sequence[SqlTask],
        store: Store,
        servers: Servers,
        judges: Judges,
        stop: Callable[[], bool] = lambda: False,
        saved: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self.config, self.tasks, self.store, self.servers, self.judges = config, tasks, store, servers, judges
        self.stop, self.saved = stop, saved
        self.preset: Preset = config.training()
        self.agent = make_agent(self.preset)
        self.progress = Progress()
        self._flushed = time.monotonic()

    def open(self) -> list[Key]:
        """The episodes nobody has answered yet, sample by sample, so that an early end has all questions once."""
        keys = [(index, sample) for sample in range(self.config.samples) for index in range(len(self.tasks))]
        return [key for key in keys if key not in self.store.answers]

    async def run(self) -> bool:
        """True when every open episode was tried, False when asked to stop. What was answered is on disk either way.

        Raises ChildEnded where the server is gone, OSError where a part cannot be written.
        """
        keys = self.open()
        pending = iter(keys)
        playing = [asyncio.create_task(self._play(pending)) for _ in range(min(self.config.in_flight, len(keys)))]
        try:
            while playing:
                done, rest = await asyncio.wait(playing, timeout=TICK_S, return_when=asyncio.FIRST_EXCEPTION)
                playing = list(rest)
                self._save_if_due()
                for task in done:
                    task.result()
                self.servers.check()
                if self.stop():
                    return False
            if self.progress.failed and not self.progress.answered:
                raise ChildEnded(f"every episode was lost; the last one: {list(self.progress.failed.values())[-1]}")
            return True
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            self._save()
            await close_clients()

    async def _play(self, pending: Iterator[Key]) -> None:
        for key in pending:
            task = self.tasks[key[0]]
            try:
                episode = await self._episode(key, task)
            except InfrastructureError as error:
                self.progress.failed[key] = str(error)
                self.progress.in_a_row += 1
                if self.progress.in_a_row >= GONE_AFTER:
                    raise ChildEnded(f"{GONE_AFTER} episodes in a row were lost; the last one: {error}") from None
                continue
            self.progress.in_a_row = 0
            self.store.add(await self.judges.answer(key, task, episode, self.store.attempt))
            self.progress.answered += 1

    async def _episode(self, key: Key, task: SqlTask) -> Episode:
        """Raises InfrastructureError after the last try. What an agent raises by mistake is no wrong answer either."""
        seconds = self.preset.runner.rollout_timeout_s
        for attempt in range(1, TRIES + 1):
            try:
                with self.servers.borrow() as channel:
                    endpoint = Endpoint(channel, channel, self._sampling(key), seconds)
                    async with asyncio.timeout(seconds):
                        return await self.agent.solve(task, endpoint)
            except Exception as error:
                if attempt == TRIES:
                    raise InfrastructureError(_words(error, seconds)) from error
            await asyncio.sleep(PAUSE_S * attempt)
        raise AssertionError("unreachable")

    def _sampling(self, key: Key) -> Sampling:
        """A seed for each episode, the same in every attempt; greedy decoding needs none."""
        seed = (self.config.seed * 7_368_787 + key[0] * 4096 + key[1]) % 2**31
        max_tokens = self.preset.data.max_response_length
        return Sampling(self.config.temperature, max_tokens, None if self.config.temperature == 0 else seed)

    def _save_if_due(self) -> None:
        if len(self.store.waiting) >= PART_ROWS or time.monotonic() - self._flushed > PART_S:
            self._save()

    def _save(self) -> None:
        self._flushed = time.monotonic()
        if rows := self.store.flush():
            self.saved(rows)


def make_agent(preset: Preset) -> SqlAgent:
    """The agent as it was trained."""
    agent = preset.agent
    return SqlAgent(
        SqlAgentConfig(
            check=agent.check, learn=agent.learn, prompt=agent.prompt, max_prompt_tokens=preset.data.max_prompt_length
        )
    )


def _words(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    said = str(error) if isinstance(error, InfrastructureError) else f"{type(error).__name__}: {error}"
    return redact(said)[:300]  # a server that refuses a key may repeat it, and this goes into the report
