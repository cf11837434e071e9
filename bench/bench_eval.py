"""What the evaluation harness costs against a server that answers at once:  python bench/bench_eval.py [QUESTIONS [IN_FLIGHT]]

Every question is answered right at the first try (one call, one query, both evaluators). Prints questions a second by the
clock, and CPU time a question: two cores give 1000 / (half of it) questions a second to whoever has them for himself.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from slurmlight import evaluating
from slurmlight.data import toy
from slurmlight.data.parquet import read_rows, write_rows
from slurmlight.evaluate.config import EvalConfig
from slurmlight.evaluate.judging import Judges
from slurmlight.evaluate.run import Harness
from slurmlight.evaluate.serve import serving
from slurmlight.evaluate.store import Store
from slurmlight.evaluate.subject import pin, questions
from slurmlight.sql.execute import Limits
from slurmlight.train.rollouts.children import Child, free_port

QUESTIONS, IN_FLIGHT = 2000, 64


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(int(sys.argv[2]), Path(sys.argv[3]))
    count = int(sys.argv[1]) if len(sys.argv) > 1 else QUESTIONS
    in_flight = int(sys.argv[2]) if len(sys.argv) > 2 else IN_FLIGHT
    with tempfile.TemporaryDirectory(prefix="bench-eval-") as folder:
        os.environ["SLURMLIGHT_HOME"] = folder
        bench(Path(folder), count, in_flight)


def bench(home: Path, count: int, in_flight: int) -> None:
    toy.ensure(home / "data/toy")
    rows = read_rows(home / "data/toy/train.parquet")
    rows = [rows[number % len(rows)] for number in range(count)]
    write_rows(home / "data/toy/bench.parquet", rows)
    port = free_port()
    server = Child(
        "server", [sys.executable, __file__, "--serve", str(port), str(home / "data/toy/bench.parquet")], home / "log"
    )
    url = f"http://127.0.0.1:{port}/v1"
    data = str(home / "data/toy/bench.parquet")
    config = evaluating.configure(
        evaluating.Asked(preset="tiny", endpoint=url, model="at-once", data=data, in_flight=in_flight)
    )
    try:
        wait(port)
        measure(home / "eval", config, server)
    finally:
        server.stop()


def measure(folder: Path, config: EvalConfig, server: Child) -> None:
    tasks = questions(config)
    store = Store(folder, 1)
    subject = pin(folder, config, tasks)
    us, other = psutil.Process(), psutil.Process(server.process.pid)
    judges = Judges(min(4, os.cpu_count() or 1), Limits(timeout_s=1.0))
    with serving(config, subject, folder) as servers, judges:
        asyncio.run(Harness(config, tasks[:64], Store(folder / "warm", 1), servers, judges).run())
        harness = Harness(config, tasks, store, servers, judges)
        before = [cpu([us]), cpu(us.children(recursive=True)), cpu([other])]
        started = time.perf_counter()
        asyncio.run(harness.run())
        seconds = time.perf_counter() - started
        after = [cpu([us]), cpu(us.children(recursive=True)), cpu([other])]
    assert len(store.answers) == len(tasks) and all(one.official for one in store.answers.values())
    spent = [1000 * (late - early) / len(tasks) for early, late in zip(before, after, strict=True)]
    harness_ms, judges_ms = spent[0], spent[1] - spent[2]  # the server is a child, too
    print(
        f"{len(tasks) / seconds:.1f} questions/s by the clock ({len(tasks)} in {seconds:.1f} s, load {os.getloadavg()[0]:.1f})"
    )
    print(f"CPU a question: harness {harness_ms:.2f} ms, judges {judges_ms:.2f} ms, the server itself {spent[2]:.2f} ms")
    print(f"on two free cores: {min(1000 / harness_ms, 2000 / sum((harness_ms, judges_ms))):.0f} questions/s")


def wait(port: int) -> None:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)


def cpu(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def serve(port: int, data: Path) -> None:
    import uvicorn

    golds = {row["question"]: row["query"] for row in read_rows(data)}

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        message = await receive()
        body = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        question = json.loads(body)["messages"][-1]["content"].splitlines()[-1]
        choice = {"index": 0, "message": {"role": "assistant", "content": golds.get(question, "SELECT 1")}}
        answer = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 60, "completion_tokens": 13}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    uvicorn.run(app, interface="asgi3", port=port, log_level="warning", access_log=False, lifespan="off")


if __name__ == "__main__":
    main()
