"""A whole embedded run in seconds: a random policy, a few tasks, and a player whose reward depends on every sampled token.

python -m tests.trainbed RUN_FOLDER    trains that run as slurmlight.train.main would, with this player
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmlight import presets
from slurmlight.agents.chat import complete
from slurmlight.agents.contract import Endpoint
from slurmlight.presets import Preset
from slurmlight.train.rollouts.children import free_port
from slurmlight.train.rollouts.player import Score

REPOSITORY = Path(__file__).resolve().parents[1]
PLAYER = "tests.trainbed:make"
QUESTIONS = [f"How many {thing} are {state}?" for thing in ("cats", "dogs", "birds", "fish") for state in ("red", "old", "big")]


class TwoCalls:
    """Two learning calls and one that does not; the reward counts the answers' characters. Trouble where the row asks for it."""

    async def __call__(self, row: Mapping[str, Any], llm: Endpoint) -> Score:
        if "trouble" in row:
            await _trouble(row["trouble"])
        question = row["question"]
        first = await complete(llm, True, [{"role": "user", "content": question}], 0)
        await complete(llm, False, [{"role": "user", "content": "was it right?"}], 1)
        second = await complete(llm, True, [{"role": "user", "content": f"{question} again"}], 2)
        length = len(first.text) + len(second.text)
        return Score(float(length % 2), detail={"answer": first.text} if row.get("detail") else {})


async def _trouble(kind: str) -> None:
    """``kind`` may end in a file name: then trouble comes only while there is no such file, which it makes."""
    kind, _, once = kind.partition(" ")
    if once:
        if os.path.exists(once):
            return
        Path(once).touch()
    match kind:
        case "hang":
            await asyncio.sleep(3600)
        case "block":
            time.sleep(3600)
        case "raise":
            raise RuntimeError("no cats here")
        case "die":
            os._exit(9)


def make(_: Preset) -> TwoCalls:
    return TwoCalls()


def write_data(folder: Path) -> None:
    """train, val, test of the same dozen questions on one database with one row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "database/pets").mkdir(parents=True)
    with sqlite3.connect(folder / "database/pets/pets.sqlite") as connection:
        connection.execute("create table pet (name text)")
        connection.execute("insert into pet values ('Rex')")
    rows = [{"question": text, "db_id": "pets", "query": "select count(*) from pet"} for text in QUESTIONS]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:3]), folder / "val.parquet")


def write_model(folder: Path) -> None:
    from slurmlight.train.embedded import tinymodel

    tokenizer = tinymodel.build_tokenizer([*QUESTIONS, "was it right?", "again"])
    tinymodel.save(folder, tinymodel.build_model(tokenizer, seed=0), tokenizer)


def make_run(folder: Path, name: str = "run", overrides: Iterable[str] = ()) -> Path:
    """A run folder under ``folder`` with data and model beside it (made once)."""
    if not (folder / "data").exists():
        write_data(folder / "data")
        write_model(folder / "models/random")
    settings = [
        f"data.train_files={folder}/data/train.parquet",
        f"data.val_files={folder}/data/val.parquet",
        "data.test_files=",
        "data.unseen_files=",
        "data.instances=1",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={folder}/models/random",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        "runner.n_runners=8",
        'trainer.logger=["console"]',
        *overrides,
    ]
    preset = presets.to_json(presets.load("tiny", settings)) | {"warmstart": None}
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(preset))
    return run


def main() -> int:
    from slurmlight.train import main as payload

    if at := os.environ.get("KILL_AT"):
        _kill_at(*at.split())
    if limit := os.environ.get("LARGEST_FILE"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    payload._engine = _engine
    return payload.main(sys.argv[1:])


def _engine(_: str) -> Any:
    from slurmlight.train.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(PLAYER)


def _kill_at(place: str, step: str) -> None:
    """Replace a part of the engine by one that ends the process by SIGKILL in the middle of ``step``."""
    import torch

    from slurmlight.train.embedded import engine

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def reached() -> bool:
        return place != "" and attempt.step == int(step)

    attempt = engine._Attempt
    prepare = engine._Attempt._prepare

    def remember(self: engine._Attempt) -> None:
        nonlocal attempt
        attempt = self  # type: ignore[assignment]
        prepare(self)

    engine._Attempt._prepare = remember  # type: ignore[method-assign]
    progress, log, save = engine._Attempt._progress, engine.Tracker.log, torch.save
    saved: list[object] = []

    def rollout(self: engine._Attempt, phase: str, total: int) -> Any:
        hear = progress(self, phase, total)
        return lambda ended: die() if reached() and ended > total // 2 else hear(ended)

    def after_row(self: Any, row: Any) -> None:
        log(self, row)
        if reached():
            die()

    def second_file(value: object, path: Any) -> None:
        saved.append(path)
        save(value, path)
        if reached() and len(saved) % 4 == 2:  # a checkpoint has four
            die()

    match place:
        case "rollout":
            engine._Attempt._progress = rollout  # type: ignore[method-assign]
        case "row":
            engine.Tracker.log = after_row  # type: ignore[method-assign]
        case "save":
            torch.save = second_file


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """An ASGI app in a thread; the URL of its /v1."""
    import uvicorn  # a player needs none

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    sys.exit(main())
