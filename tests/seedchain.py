"""The seed stack's rollouts without Ray, verl's workers and vLLM: store, litellm proxy, nursed runners, spans, rows.

python -m tests.seedchain RUN_FOLDER    plays one scenario after the other and prints a JSON line of each: what came of it

The model server answers at once; its token ids follow from the prompt, so that rows can be told apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI, Request

from slurmlight.files import read_json
from slurmlight.presets import Preset, from_json
from slurmlight.train.engine import Outcome
from slurmlight.train.rollouts.children import free_port
from tests import seedbed

MODEL = "models/random"
REWARD_ROW = [{"question": "How many cats are red?"}]


def answer(body: dict[str, Any]) -> dict[str, Any]:
    text = body["messages"][-1]["content"]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "x" * (len(text) % 3)},
        "token_ids": [len(text), 7],
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    told = {"id": f"chatcmpl-{time.time_ns()}", "object": "chat.completion", "created": 0, "model": MODEL, "usage": usage}
    return told | {"choices": [choice], "prompt_token_ids": [1, len(text), 3]}


class Chain:
    def __init__(self, parts: Any, store: Any, adapter: Any, preset: Preset) -> None:
        from slurmlight.train.seed.daemon import Daemon
        from slurmlight.train.seed.hooks import Hooks, Rules

        self.parts, self.delay_s, self.bodies = parts, 0.0, []
        rules = Rules(seed=0, timeout_s=60, max_failed_share=preset.runner.max_failed_share, validate_first=False)
        hooks = Hooks(
            beat=lambda *_: None,
            log=lambda *_: None,
            stop=lambda: False,
            alive=parts.alive,
            episode_ended=parts.runners.episode_ended,
            save=lambda *_: None,
        )
        self.daemon = Daemon(None, 2, {"model": MODEL}, None, 2, 0, store=store, llm_proxy=parts.proxy, adapter=adapter).guard(
            rules, hooks, lambda _: None
        )
        self.address = self._serve()

    def _serve(self) -> str:
        app, port = FastAPI(), free_port()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> dict[str, Any]:
            body = await request.json()
            self.bodies.append(body)
            await asyncio.sleep(self.delay_s)
            return answer(body)

        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        threading.Thread(target=server.run, daemon=True).start()
        return f"127.0.0.1:{port}"

    def play(self, rows: list[dict[str, Any]], train: bool = True) -> None:
        from slurmlight.train.seed.trainer import _batch

        self.daemon.set_up_data_and_server(_batch(rows), [self.address], is_train=train)
        self.daemon.run_until_all_finished()

    def batch(self) -> tuple[Any, dict[str, Any]]:
        import torch

        return self.daemon.get_train_data_batch(16, 8, torch.device("cpu"), 1)

    def failing(self, rows: list[dict[str, Any]]) -> str:
        try:
            self.play(rows)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def rows_of(chain: Chain) -> dict[str, Any]:
    chain.play([*REWARD_ROW, {"question": "How many dogs are old?"}])
    batch, metrics = chain.batch()
    found = []
    for row in range(len(batch)):
        mask = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][mask].tolist()
        found.append([batch.non_tensor_batch["rollout_id_list"][row], ids, batch.batch["token_level_scores"][row].sum().item()])
    sent = chain.bodies[-1]  # the first is the proxy asking whether the model is well
    return {"rows": found, "metrics": {name: float(value) for name, value in metrics.items()}, "sent": sent}


def validation(chain: Chain) -> dict[str, Any]:
    chain.bodies.clear()
    chain.play(REWARD_ROW, train=False)
    metrics = {name: float(value) for name, value in chain.daemon.get_test_metrics().items()}
    return {"metrics": metrics, "temperatures": [body["temperature"] for body in chain.bodies]}


def raising(chain: Chain) -> dict[str, Any]:
    return {"error": chain.failing([{"question": "x", "trouble": "raise"}])}


def endless(chain: Chain) -> dict[str, Any]:
    """One episode waits for ever, one lets its runner's event loop stand still."""
    chain.failing([{"question": "x", "trouble": "hang"}, {"question": "x", "trouble": "block"}])
    return {"failures": sorted(chain.daemon.failures.values())}


def runner_killed(chain: Chain) -> dict[str, Any]:
    """One of two runners is killed in the middle of four episodes; the next batch is whole again."""
    nurse = psutil.Process(chain.parts.runners.nurse.pid)
    chain.delay_s = 1.0
    threading.Timer(2.0, lambda: nurse.children()[0].kill()).start()
    chain.play([{"question": "a"}, {"question": "b"}])
    failures = list(chain.daemon.failures.values())
    chain.delay_s = 0.0
    chain.play([{"question": "a"}, {"question": "b"}])
    return {"failures": failures, "failed_next": chain.daemon.failed, "runners": len(nurse.children())}


def dying(chain: Chain) -> dict[str, Any]:
    return {"error": chain.failing([{"question": "x", "trouble": "die"}])}


def proxy_killed(chain: Chain) -> dict[str, Any]:
    chain.delay_s = 5.0
    threading.Timer(1.0, lambda: os.kill(chain.parts.proxy.server_launcher._proc.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    return {"error": chain.failing(REWARD_ROW), "seconds": time.monotonic() - started}


SCENARIOS = (rows_of, validation, raising, endless, runner_killed, dying, proxy_killed)


def main(folder: Path) -> None:
    from slurmlight.train.seed import agent, fit

    agent.GRACE_S = 1.0
    preset = from_json(read_json(folder / "config.json"))
    logs = folder / "attempts/001"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        parts = fit.Parts(preset, seedbed.PLAYER, logs, free_port(), Path(scratch))

        def attempt(store: Any, adapter: Any) -> Outcome:
            chain = Chain(parts, store, adapter, preset)
            for scenario in SCENARIOS:
                print(json.dumps({"scenario": scenario.__name__} | scenario(chain)), flush=True)
            chain.daemon.close()
            return Outcome(finished=True, step=0)

        fit.run(parts, attempt)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
