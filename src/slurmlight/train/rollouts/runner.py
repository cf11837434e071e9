"""A warm runner: claims rollouts from the gateway, plays many at once, reports rewards and failures.

    AGL_KEY=... python -m slurmlight.train.rollouts.runner --server URL --run RUN_FOLDER --name NAME --slots N

Works on any machine that reaches the gateway and sees the run folder. Claims are atomic (the gateway refuses a second one),
so any number of runners may share a gateway. An episode that fails, hangs or blocks ends alone; none of these is a reward.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpcore
import httpx

from slurmlight.agents.contract import Channel, Endpoint, Sampling
from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.train.config import read_preset
from slurmlight.train.rollouts.gateway import key_from_environment
from slurmlight.train.rollouts.player import Player, Score, load_player

SQL_PLAYER = "slurmlight.train.rollouts.sql_player:make"
EXIT_BLOCKED = 70  # EX_SOFTWARE of sysexits.h
TIMEOUT, ERROR, BLOCKED, LOST = "timeout", "error", "blocked", "lost"  # first word of a failed rollout's error message
_POLL_S = 0.05
_GATEWAY_GONE_S = 60.0
_CALL_TIMEOUT = {"connect": 60.0, "read": 60.0, "write": 60.0, "pool": 60.0}


class GatewayError(Exception):
    """The gateway is out of reach or refuses a call."""


class Runner:
    def __init__(self, server: str, key: str, name: str, slots: int, player: Player, preset: Preset) -> None:
        self.server = server.rstrip("/")
        self.key = key
        self.name = name
        self.slots = slots
        self.player = player
        self.timeout_s = preset.runner.rollout_timeout_s
        self.max_tokens = preset.data.max_response_length
        self.temperature = preset.actor_rollout_ref.rollout.temperature
        self.http = httpcore.AsyncConnectionPool(max_connections=slots + 1, max_keepalive_connections=slots + 1)
        self.episodes: set[asyncio.Task[None]] = set()
        self.last_tick = time.monotonic()

    async def run(self) -> None:
        """Claim and play until cancelled. Raises GatewayError when the gateway was out of reach for a minute."""
        threading.Thread(target=self._watch_loop, args=(asyncio.get_running_loop(),), daemon=True).start()
        answered = time.monotonic()
        while True:
            self.last_tick = time.monotonic()
            free, claimed = self.slots - len(self.episodes), 0
            try:
                if free:
                    claimed = await self._claim(free)
                answered = time.monotonic()
            except GatewayError:
                if time.monotonic() - answered > _GATEWAY_GONE_S:
                    raise
            if claimed == 0 or claimed < free:  # several that ended meanwhile are replaced by one look
                await asyncio.sleep(_POLL_S)

    async def _claim(self, free: int) -> int:
        """Take up to ``free`` queued rollouts; how many were taken."""
        _, taken = await self._ask("POST", "/claims", {"name": self.name, "limit": free})
        for rollout in taken:
            task = asyncio.create_task(self._episode(rollout), name=rollout["rollout_id"])
            self.episodes.add(task)
            task.add_done_callback(self.episodes.discard)
        return len(taken)

    async def _episode(self, rollout: Mapping[str, Any]) -> None:
        rollout_id = rollout["rollout_id"]
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                score = await self.player(rollout["input"], self.endpoint(rollout))
        except Exception as error:  # whatever an agent raises is this episode's end, not the runner's
            message = f"{TIMEOUT}: no answer within {self.timeout_s:g} s" if limit.expired() else f"{ERROR}: {_words(error)}"
            print(f"episode {rollout_id} failed: {message}", file=sys.stderr, flush=True)
            end = {"status": {"state": "failed", "error_message": message}}
        else:
            end = {"status": {"state": "succeeded"}, "events": _events(rollout, score)}
        with contextlib.suppress(GatewayError):  # a gateway that is gone is noticed by run()
            # refused where the episode was failed or forgotten meanwhile
            await self._ask("POST", f"/rollouts/{rollout_id}/end", end, (404, 409))

    def endpoint(self, rollout: Mapping[str, Any]) -> Endpoint:
        """The learning channel is attempt 0; what goes through attempt "aux" is kept by the gateway but not trained on."""
        mode = "train" if rollout["is_train"] else "val"
        learn, aux = (
            Channel(
                f"{self.server}/proxy/rollout/{rollout['rollout_id']}/attempt/{attempt}/mode/{mode}/openai/v1",
                self.key,
                "policy",
            )
            for attempt in ("0", "aux")
        )
        row = rollout["input"]
        seed = row.get("seed") if isinstance(row, dict) else None
        temperature = self.temperature if rollout["is_train"] else 0.0
        return Endpoint(learn, aux, Sampling(temperature, self.max_tokens, seed), self.timeout_s)

    async def _ask(self, method: str, path: str, body: Any = None, refusals: Sequence[int] = ()) -> tuple[int, Any]:
        """Status and JSON of an API call; other errors than ``refusals`` raise GatewayError.

        httpcore instead of the httpx above it: half the CPU, of which small calls are most of a runner's.
        """
        headers: dict[bytes | str, bytes | str] = {
            "Authorization": f"Bearer {self.key}",
            "Content-Type": "application/json",
        }
        content = None if body is None else json.dumps(body).encode()
        try:
            answer = await self.http.request(
                method, f"{self.server}/api{path}", headers=headers, content=content, extensions={"timeout": _CALL_TIMEOUT}
            )
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise GatewayError(f"{method} {path}: {error!r}") from error
        if answer.status >= 400 and answer.status not in refusals:
            raise GatewayError(f"{method} {path}: status {answer.status} {answer.content[:200]!r}")
        return answer.status, json.loads(answer.content)

    def _watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: an agent that blocks the event loop blocks every episode here. Name it and end."""
        while time.monotonic() - self.last_tick < self.timeout_s:
            time.sleep(min(1.0, self.timeout_s / 4))
        task = asyncio.current_task(loop)
        message = f"{BLOCKED}: the agent blocked its runner for {self.timeout_s:g} s"
        if task is not None and task in self.episodes:
            print(f"episode {task.get_name()} failed: {message}", file=sys.stderr, flush=True)
            with contextlib.suppress(httpx.HTTPError):  # who waits for the episode fails it later, too
                httpx.patch(
                    f"{self.server}/api/rollouts/{task.get_name()}",
                    json={"status": {"state": "failed", "error_message": message}},
                    headers={"Authorization": f"Bearer {self.key}"},
                    trust_env=False,
                )
        os._exit(EXIT_BLOCKED)


def _events(rollout: Mapping[str, Any], score: Score) -> list[dict[str, Any]]:
    """In validation the reward is plain execution match: a shaped one cannot hide a worse model."""
    value = score.reward if rollout["is_train"] or score.parts is None else score.parts.plain
    found = [{"event_type": "reward", "data": {"value": value, "source": "agent", "reason": score.reason}}]
    if score.parts:
        found.append({"event_type": "parts", "data": {"reward": score.reward, **asdict(score.parts)}})
    if score.detail:
        found.append({"event_type": "detail", "data": score.detail})
    return found


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _reach_directly(server: str) -> None:
    """Agents' clients honour http_proxy; the gateway is never behind it."""
    host = httpx.URL(server).host
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name, ""), host]))


async def serve(runner: Runner) -> None:
    async with runner.http:
        await runner.run()


def main() -> None:
    parser = argparse.ArgumentParser(description="A warm runner of rollouts.")
    parser.add_argument("--server", required=True, help="URL of the gateway")
    parser.add_argument("--run", type=Path, required=True, help="run folder with config.json")
    parser.add_argument("--name", required=True, help="name of this runner, unique at the gateway")
    parser.add_argument("--slots", type=int, required=True, help="episodes in flight")
    parser.add_argument("--player", default=SQL_PLAYER, help="module:function that makes the player")
    asked = parser.parse_args()
    _reach_directly(asked.server)
    try:
        preset = read_preset(asked.run)
        player = load_player(asked.player, preset)
        runner = Runner(asked.server, key_from_environment(), asked.name, asked.slots, player, preset)
    except UserError as error:
        raise SystemExit(f"runner: {error}") from None
    asyncio.run(serve(runner))


if __name__ == "__main__":
    main()
