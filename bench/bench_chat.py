"""What a chat call costs vLLM's HTTP server, by its own handler and past it:  make bench-chat   (needs make stack; CPU)

CPU of the server's one Python process a call (the engine is another process), 48 calls in flight, 32 tokens an answer, every
prompt different and with 8 rollouts to a prompt. The policy is random; train/verl/chat.py is what goes past the handler.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil
from vllm_server import OWN, serving

from slurmlight.train.embedded import tinymodel

CALLS, IN_FLIGHT, WORDS = 200, 48, 480
TALK = "select count name from table where id order by group join left limit value number of the rows column"
OPTIONS = "--max-model-len=2048 --max-num-seqs=64 --disable-log-stats --gpu-memory-utilization=0.1"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sl-") as folder:
        scratch = Path(folder)
        tinymodel.MAX_POSITIONS = 2048
        tokenizer = tinymodel.build_tokenizer([TALK])
        tinymodel.save(scratch / "model", tinymodel.build_model(tokenizer, seed=0), tokenizer)
        with serving(scratch, scratch / "model", OPTIONS) as (url, pid):
            asyncio.run(_bench(url, psutil.Process(pid)))


async def _bench(url: str, server: psutil.Process) -> None:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        await _ask(session, range(2 * IN_FLIGHT), {}, 1)  # warm
        for rollouts, what in ((1, "every prompt different"), (8, "8 rollouts a prompt")):
            took = {}
            for name, headers in (("own", OWN), ("past", {})):
                start = random.randrange(1 << 30)  # prompts that were not asked before
                before, began = sum(server.cpu_times()[:2]), time.perf_counter()
                tokens = await _ask(session, range(start, start + CALLS), headers, rollouts)
                took[name] = (sum(server.cpu_times()[:2]) - before) * 1000 / CALLS
                print(
                    f"{what}, {name}: {took[name]:.2f} ms CPU a call, {time.perf_counter() - began:.1f} s, {tokens:.0f} tokens"
                )
            print(f"{what}: {took['own'] / took['past']:.1f}x")


async def _ask(session: aiohttp.ClientSession, calls: range, headers: dict[str, str], rollouts: int) -> float:
    """Mean tokens of a prompt."""
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(call: int) -> int:
        chosen = random.Random(call // rollouts)
        text = " ".join(chosen.choice(TALK.split()) for _ in range(WORDS))
        body = {"model": "policy", "messages": [{"role": "user", "content": text}], "temperature": 1.0, "max_tokens": 32}
        async with (
            gate,
            session.post(
                "/v1/chat/completions", json=body | {"logprobs": True, "return_token_ids": True}, headers=headers
            ) as answer,
        ):
            return (await answer.json())["usage"]["prompt_tokens"]

    return sum(await asyncio.gather(*map(one, calls))) / len(calls)


if __name__ == "__main__":
    main()
