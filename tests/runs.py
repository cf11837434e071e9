"""Helpers of the tests of a run's life: a run folder with a plan, a supervisor as its own process, polling."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmlight import plan as plans
from slurmlight.cluster import attempts
from slurmlight.cluster.attempts import Attempt
from slurmlight.files import read_json, write_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder
from tests.shared import REPOSITORY

PAYLOAD = Path(__file__).with_name("steps_payload.py")


def make_run(
    home: Path, name: str = "demo", *, steps: int = 6, seconds: float = 0.1, save_freq: int = 2, **plan: Any
) -> RunFolder:
    """A run under ``home``/checkpoints whose payload is tests/steps_payload.py; ``plan`` changes fields of its JobPlan."""
    folder = home / "checkpoints" / name
    folder.mkdir(parents=True)
    payload = (sys.executable, str(PAYLOAD), str(folder), str(steps), str(seconds), str(save_freq))
    base = JobPlan(name, str(folder), str(REPOSITORY), "local", "demo", payload)
    run = RunFolder(folder)
    write_json(run.config, {"name": name})
    write_json(run.plan, plans.to_json(replace(base, **plan)))
    return run


def add_fault(run: RunFolder, step: int, do: str, attempt: int | None = None) -> None:
    with open(run.path / "faults.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "attempt": attempt, "do": do}) + "\n")


@contextmanager
def supervised(run: RunFolder, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A supervisor of ``run`` as its own process, ended afterwards whatever happened."""
    argv = [sys.executable, "-m", "slurmlight.cluster.supervisor", str(run.path)]
    path = {"PYTHONPATH": str(REPOSITORY)}  # the payload imports from tests/
    process = subprocess.Popen(argv, env=os.environ | path | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.7)
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def finish(run: RunFolder, limit_s: float = 60.0, **env: str) -> tuple[int, str]:
    """Supervise ``run`` to its end: exit code and what was printed."""
    with supervised(run, **env) as process:
        said, _ = process.communicate(timeout=limit_s)
        return process.returncode, said


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = 30.0) -> Any:
    """Poll until ``condition()`` is true and return it; the time limit is generous, the failure says what was awaited."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.05)
    return found


def step(run: RunFolder) -> int:
    status = run.status()
    return status.step if status else -1


def records(run: RunFolder) -> list[Attempt]:
    return attempts.load(run)


def log(run: RunFolder) -> str:
    """The logs of all attempts."""
    return "".join(attempts.log_path(run, number).read_text() for number in run.attempt_numbers())


def outcome(run: RunFolder) -> dict[str, Any]:
    return read_json(run.path / "outcome.json") or {}
