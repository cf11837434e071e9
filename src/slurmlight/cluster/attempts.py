"""Attempts of a run: one folder a start of the supervisor, with an append-only log and a record of how it ended.

RUN/attempts/003/log.txt        everything the supervisor and the payload said
                 attempt.json   where it ran, when, which steps it did, why it ended
RUN/attempts/latest             link to the newest
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from slurmlight.files import append_line, read_json, write_json
from slurmlight.runfolder import RunFolder

LOST = "lost"


@dataclass(frozen=True)
class Attempt:
    """Record of one attempt. Times are seconds since the epoch; ``ended`` None: it runs, or nobody could say how it ended.

    ``kind`` is one of decide.Kind or "lost"; ``first_step``/``last_step`` are the steps it did (None: not one);
    ``complete_step`` is the newest checkpoint when it ended; ``phases`` maps a phase to its seconds.
    """

    attempt: int
    job: str
    node: str
    restarts: int
    pid: int
    mark: str
    started: float
    metrics_offset: int
    ended: float | None = None
    kind: str = ""
    stop_reason: str = ""
    reason: str = ""
    cause: str = ""
    exit_code: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    complete_step: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps it did."""
        return 0 if self.first_step is None or self.last_step is None else self.last_step - self.first_step + 1

    @property
    def seconds(self) -> float:
        return max(0.0, (self.ended or time.time()) - self.started)


class Log:
    """An attempt's log: lines of the supervisor between those of the payload, which writes to the same file."""

    def __init__(self, path: Path, started: float) -> None:
        self.path = path
        self._started = started

    def line(self, text: str) -> None:
        """Raises nothing: a full disk must not end the supervisor, which is the one to say so."""
        try:
            append_line(self.path, text)
        except OSError:
            return

    def phase(self, name: str, text: str = "") -> None:
        """A marker: what begins now, and how many seconds after the attempt's start."""
        self.line(f"[{name}] +{time.time() - self._started:.1f} s" + (f": {text}" if text else ""))

    def open(self) -> int:
        """A descriptor the payload can append to."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def record_path(folder: RunFolder, number: int) -> Path:
    return folder.attempt(number) / "attempt.json"


def log_path(folder: RunFolder, number: int) -> Path:
    return folder.attempt(number) / "log.txt"


def load(folder: RunFolder) -> list[Attempt]:
    """The attempts in order; a folder without a readable record (torn, foreign) is left out."""
    found = (_read(record_path(folder, number)) for number in folder.attempt_numbers())
    return [attempt for attempt in found if attempt is not None]


def save(folder: RunFolder, attempt: Attempt) -> None:
    write_json(record_path(folder, attempt.attempt), asdict(attempt))


def begin(folder: RunFolder, *, job: str, node: str, restarts: int, mark: str) -> tuple[Attempt, Log]:
    """Open the next attempt: folder, record, log with its marker line, ``latest`` link. Raises OSError."""
    number = max(folder.attempt_numbers(), default=0) + 1
    folder.attempt(number).mkdir(parents=True)
    attempt = Attempt(
        attempt=number,
        job=job,
        node=node,
        restarts=restarts,
        pid=os.getpid(),
        mark=mark,
        started=time.time(),
        metrics_offset=_size(folder.metrics),
    )
    save(folder, attempt)
    _link(folder, number)
    log = Log(log_path(folder, number), attempt.started)
    log.line(f"=== slurmlight attempt {number} ===")
    return attempt, log


def close(folder: RunFolder, attempt: Attempt, **found: Any) -> Attempt:
    """``attempt`` with what is known of its end; its steps are read from the metrics. Writes nothing."""
    steps = [step for step in _steps(folder, attempt.metrics_offset, None) if step > 0]
    return replace(
        attempt,
        ended=time.time(),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        complete_step=newest_checkpoint(folder),
        **found,
    )


def close_lost(folder: RunFolder, attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts with an end for those that could not write theirs (power cut, kill -9), as of their last sign of life.

    Only for the owner of the run's lock, or for readers who know that none of the open ones still runs. Writes nothing.
    """
    closed: list[Attempt] = []
    for index, attempt in enumerate(attempts):
        if attempt.ended is None:
            bound = attempts[index + 1].metrics_offset if index + 1 < len(attempts) else None
            steps = [step for step in _steps(folder, attempt.metrics_offset, bound) if step > 0]
            attempt = replace(
                attempt,
                ended=_last_sign(folder, attempt),
                kind=LOST,
                reason="node or supervisor died",
                first_step=steps[0] if steps else None,
                last_step=steps[-1] if steps else None,
            )
        closed.append(attempt)
    return closed


def newest_checkpoint(folder: RunFolder) -> int:
    """The step the tracker file names; 0 without one. (The payload decides which checkpoint is whole; this is for reports.)"""
    try:
        return int(folder.tracker.read_text().strip())
    except (OSError, ValueError):
        return 0


def lost_steps(attempts: Sequence[Attempt], *, resumes_from: int | None = None) -> list[int]:
    """Steps of each attempt that a later one did again (same order). ``resumes_from``: where the next one would begin."""
    lost = [0] * len(attempts)
    following = resumes_from
    for index in range(len(attempts) - 1, -1, -1):
        attempt = attempts[index]
        if attempt.first_step is None or attempt.last_step is None:
            continue
        if following is not None:
            lost[index] = max(0, attempt.last_step - max(following, attempt.first_step - 1))
        following = attempt.first_step - 1 if following is None else min(following, attempt.first_step - 1)
    return lost


def _steps(folder: RunFolder, begin: int, stop: int | None) -> list[int]:
    try:
        with open(folder.metrics, "rb") as file:
            file.seek(begin)
            lines = file.read(-1 if stop is None else max(0, stop - begin)).splitlines()
    except OSError:
        return []
    steps = []
    for line in lines:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(step, int):
            steps.append(step)
    return steps


def _last_sign(folder: RunFolder, attempt: Attempt) -> float:
    status = folder.status()
    beat = status.time if status and status.attempt == attempt.attempt else 0.0
    try:
        written = log_path(folder, attempt.attempt).stat().st_mtime
    except OSError:
        written = 0.0
    return max(attempt.started, beat, written)


def _link(folder: RunFolder, number: int) -> None:
    temporary = folder.attempts / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"{number:03d}")
    os.replace(temporary, folder.attempts / "latest")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path) -> Attempt | None:
    value = read_json(path)
    if not isinstance(value, dict):
        return None
    known = {item.name for item in fields(Attempt)}
    try:
        return Attempt(**{key: item for key, item in value.items() if key in known})
    except TypeError:
        return None
