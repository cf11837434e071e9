"""The run folder: the only place where the cluster half and the training half meet.

    RUN/config.json                   the resolved preset: what to train (written once, by launch)
        plan.json                     the JobPlan: where and how to run it (rewritten by each launch)
        job.json                      the job that runs it: cluster, job id, when submitted
        attempts/001/ ... latest      one folder a start of the supervisor: log.txt, attempt.json
        status.json                   the payload's heartbeat: step, reward, phase, when
        stop.json                     a request to save and stop at the next step boundary
        finished.json                 the finish mark: nothing is left to do
        metrics.jsonl                 one line a step
        global_step_N/                checkpoints (verl's layout)
        latest_checkpointed_iteration.txt

Every file is replaced atomically; whoever dies, the other half can read how far it came.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmlight.errors import UserError, unknown_name
from slurmlight.files import append_line, read_json, read_json_lines, write_json


@dataclass(frozen=True)
class Status:
    """What the payload last said of itself. ``time`` is seconds since the epoch; rewards are None until known."""

    step: int
    total_steps: int
    phase: str
    attempt: int
    time: float
    reward: float | None = None
    validation: float | None = None
    seconds_per_step: float | None = None
    pid: int | None = None
    note: str = ""


@dataclass(frozen=True)
class StopRequest:
    """Save at the next step boundary and end. ``reason``: preemption, time limit, cancel, hang, parent gone ..."""

    reason: str
    attempt: int
    time: float = field(default_factory=time.time)


class RunFolder:
    """Paths and small records of one run. Methods raise OSError only; a missing or torn file reads as None."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tracker(self) -> Path:
        return self.path / "latest_checkpointed_iteration.txt"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:03d}"

    def attempt_numbers(self) -> list[int]:
        if not self.attempts.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.attempts.iterdir() if entry.name.isdigit())

    # the payload writes, the supervisor and people read

    def beat(self, status: Status) -> None:
        write_json(self.path / "status.json", asdict(status))

    def status(self) -> Status | None:
        return _build(Status, read_json(self.path / "status.json"))

    def mark_finished(self, step: int, attempt: int) -> None:
        write_json(self.path / "finished.json", {"step": step, "attempt": attempt, "time": time.time()})

    def finished(self) -> dict[str, Any] | None:
        return read_json(self.path / "finished.json")

    def add_metrics(self, row: dict[str, Any]) -> None:
        append_line(self.metrics, json.dumps(row, sort_keys=True))

    def metric_rows(self) -> list[dict[str, Any]]:
        """One row a step, in order of step. A step that was done twice (lost, then repeated) keeps its last row."""
        rows = {row["step"]: row for row in read_json_lines(self.metrics) if isinstance(row.get("step"), int)}
        return [rows[step] for step in sorted(rows)]

    # the supervisor writes, the payload reads at each step boundary

    def request_stop(self, request: StopRequest) -> None:
        write_json(self.path / "stop.json", asdict(request))

    def stop_request(self) -> StopRequest | None:
        return _build(StopRequest, read_json(self.path / "stop.json"))

    def clear_stop(self) -> None:
        (self.path / "stop.json").unlink(missing_ok=True)


def _build[Record](kind: type[Record], value: Any) -> Record | None:
    """``value`` as a ``kind``; None where it does not fit (another version's or a foreign file)."""
    try:
        return kind(**value)
    except TypeError:
        return None


def home() -> Path:
    """The folder that holds data/, models/ and checkpoints/: SLURMLIGHT_HOME, else the current folder."""
    return Path(os.environ.get("SLURMLIGHT_HOME") or Path.cwd()).absolute()


def find_run(text: str | None = None) -> RunFolder:
    """The run called ``text`` (a name under checkpoints/, or a path); without one the run launched last.

    Raises UserError, naming the runs there are, where there is none.
    """
    if text is None:
        if not (runs := all_runs()):
            raise UserError(f"no run under {home() / 'checkpoints'}", "start one: python launch.py --preset tiny")
        return max(runs, key=launched)
    for path in (home() / "checkpoints" / text, Path(text)):
        if is_run(path):
            return RunFolder(path)
    raise unknown_name("run", text, [run.name for run in all_runs()])


def all_runs() -> list[RunFolder]:
    """Every run under checkpoints/, by name; also those whose folder may not be looked into. Raises UserError where
    checkpoints/ itself may not."""
    root = home() / "checkpoints"
    try:
        found = sorted(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"folder {root} cannot be read ({error.strerror})", "see SLURMLIGHT_HOME and its permissions") from None
    return [RunFolder(path) for path in found if is_run(path)]


def is_run(path: Path) -> bool:
    """Whether config.json is there. A folder that may not be looked into is taken for a run: reading it says what is wrong."""
    try:
        os.stat(path / "config.json")
    except PermissionError:
        return True
    except OSError:  # nothing there, or too long to be a name
        return False
    return True


def launched(run: RunFolder) -> float:
    """When the run was launched last; 0 where that cannot be read."""
    try:
        return run.config.stat().st_mtime
    except OSError:
        return 0.0


@contextmanager
def readable(run: RunFolder) -> Iterator[None]:
    """For commands: a file of ``run`` that cannot be read (or written) becomes a UserError that names it. Other errors pass."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str | Path) or not Path(error.filename).is_relative_to(run.path):
            raise
        raise UserError(
            f"run {run.name}: {error.filename} cannot be used ({error.strerror})", "mend it, or do this as the run's owner"
        ) from None
