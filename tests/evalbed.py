"""What the tests of evaluation share: a scripted OpenAI server, and evaluations of it in this process or as jobs."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import os
import signal
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvicorn

from slurmlight import evaluating
from slurmlight.data.parquet import write_rows
from slurmlight.evaluate import main as payload
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder
from slurmlight.train.rollouts.children import free_port

APPROVED = "THE QUERY IS CORRECT"


class Scripted:
    """``with Scripted(answer) as server``: answers every chat completion with ``answer(messages)``; None is a status 500.

    ``refused`` is a field that gives a status 400, ``port`` where it listens (any by default).
    """

    def __init__(
        self,
        answer: Callable[[list[dict[str, str]]], str | None],
        delay_s: float = 0.0,
        refused: str = "",
        port: int | None = None,
    ) -> None:
        self.answer, self.delay_s, self.refused, self.port = answer, delay_s, refused, port or free_port()
        self.asked: Counter[str] = Counter()  # by last user message
        self.keys: set[str] = set()

    def __enter__(self) -> Scripted:
        self.url = f"http://127.0.0.1:{self.port}/v1"
        config = uvicorn.Config(
            self._app, interface="asgi3", port=self.port, log_level="error", access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._thread.join(30)

    def die(self) -> None:
        """Answer nothing any more, not even to connections."""
        self._server.should_exit = self._server.force_exit = True

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        message = await receive()
        body = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        self.keys |= {value.decode() for name, value in scope["headers"] if name == b"authorization"}
        request = json.loads(body)
        messages = request["messages"]
        refuses = bool(self.refused) and self.refused in request
        self.asked[messages[-1]["content"]] += not refuses
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        text = None if refuses else self.answer(messages)
        if self._server.should_exit:
            await asyncio.sleep(60)  # cut off when the server ends, in a moment
        status = 400 if refuses else 500 if text is None else 200
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        answer = json.dumps({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def replay(predictions: dict[str, str]) -> Callable[[list[dict[str, str]]], str | None]:
    """Answers with the prediction for the question in the conversation, and approves of every query when asked to check."""

    def answer(messages: list[dict[str, str]]) -> str:
        if "You review" in messages[0]["content"]:
            return APPROVED
        text = next(one["content"] for one in messages if one["role"] == "user")
        question = text.rpartition("Question: ")[2].strip() if "Question: " in text else text.splitlines()[-1]
        return f"```sql\n{predictions.get(question, 'SELECT 1')}\n```"

    return answer


def published(verdicts: Path, spider: Path, system: str) -> list[dict[str, Any]]:
    """The dev questions that ``system``'s predictions cover: dev row, prediction, recorded verdict. Equal texts left out."""
    dev = json.loads((spider / "dev.json").read_text())
    texts = Counter(row["question"].strip() for row in dev)
    with gzip.open(verdicts, "rt", encoding="utf8", newline="") as file:
        pairs = [
            row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if system in row["systems"].split(",")
        ]
    found: dict[int, dict[str, Any]] = {}
    for pair in pairs:
        row = dev[int(pair["dev_index"])]
        if texts[row["question"].strip()] == 1:
            found[int(pair["dev_index"])] = row | {"pred": pair["pred"], "official": int(pair["official"])}
    return [found[index] for index in sorted(found)]


def unpack_spider(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / "spider"


def write_questions(folder: Path, rows: Sequence[dict[str, Any]], name: str = "questions.parquet") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / name, [{key: row[key] for key in ("question", "db_id", "query")} for row in rows])
    return folder / name


def prepared(asked: evaluating.Asked, **plan: Any) -> RunFolder:
    """The evaluation's folder, ready for its payload."""
    config = evaluating.configure(asked)
    folder = evaluating.folder_of(config, asked.name)
    made = JobPlan(folder.name, str(folder.path), str(Path.cwd()), "local", "tiny", ("true",))
    return evaluating.prepare(config, replace(made, **plan), fresh=False)


def evaluate(asked: evaluating.Asked) -> tuple[int, RunFolder]:
    """Run an evaluation's payload here: exit code and folder."""
    folder = prepared(asked)
    return run_payload(folder), folder


def run_payload(folder: RunFolder) -> int:
    number = max(folder.attempt_numbers(), default=0) + 1
    folder.attempt(number).mkdir(parents=True)
    with handlers_kept(), patch.dict(os.environ, {"SLURMLIGHT_ATTEMPT": str(number)}):
        return payload.main([str(folder.path)])


@contextmanager
def handlers_kept() -> Iterator[None]:
    """The payload listens to signals; pytest's own handlers come back afterwards."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
