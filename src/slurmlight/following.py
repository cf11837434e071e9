"""Follow a run to its end: log lines of all its attempts as they come, a progress bar in a terminal, how it ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmlight.cluster import guard, slurm
from slurmlight.files import read_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder, Status
from slurmlight.secrets import redact

POLL_S = 0.3
SLURM_POLL_S = 10.0
GRACE_S = 15.0  # a local job's supervisor may take this long to appear, or to say how it ended


class LogTail:
    """What is new in a run's logs, attempt after attempt. A line is given once it is whole, or its attempt has ended."""

    def __init__(self, run: RunFolder, *, from_now: bool = False) -> None:
        self.run = run
        self.attempt, self.offset = 0, 0
        if from_now and (numbers := run.attempt_numbers()):
            self.attempt = numbers[-1]
            self.offset = _size(self._log(self.attempt))

    def lines(self) -> list[str]:
        """Lines that came since the last call."""
        found: list[str] = []
        for number in [number for number in self.run.attempt_numbers() if number >= self.attempt]:
            if number > self.attempt:
                found += self._read(to_the_end=True)
                self.attempt, self.offset = number, 0
            found += self._read(to_the_end=False)
        return found

    def rest(self) -> list[str]:
        """Everything left, a torn last line included: for a run that has ended."""
        return self.lines() + self._read(to_the_end=True)

    def _read(self, to_the_end: bool) -> list[str]:
        try:
            with self._log(self.attempt).open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return []
        whole = len(data) if to_the_end else data.rfind(b"\n") + 1
        self.offset += whole
        return redact(data[:whole].decode(errors="replace")).splitlines()

    def _log(self, attempt: int) -> Path:
        return self.run.attempt(attempt) / "log.txt"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Ending:
    """Whether a run has ended, asked often: its outcome first, then whether anybody still works on it."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.job: dict[str, Any] = read_json(run.job) or {}
        self._seen = time.monotonic()
        self._asked = time.monotonic()

    def reached(self) -> bool:
        if read_json(self.run.path / "outcome.json"):
            return True
        now = time.monotonic()
        if self.job.get("cluster") == "local":
            if guard.living(self.run) is not None:
                self._seen = now
                return False
            return now - self._seen > GRACE_S or bool(self.run.finished())
        if now - self._asked < SLURM_POLL_S:
            return False
        self._asked = now
        return slurm.job_state(str(self.job.get("job_id", "0"))).final


def follow(run: RunFolder, *, from_now: bool = False) -> None:
    """Print a run's log until it has ended. KeyboardInterrupt passes through."""
    tail, ending = LogTail(run, from_now=from_now), Ending(run)
    with _screen(run) as show:
        while True:
            over = ending.reached()
            for line in tail.rest() if over else tail.lines():
                show(line)
            if over:
                return
            show(None)
            time.sleep(POLL_S)


@contextmanager
def _screen(run: RunFolder) -> Iterator[Any]:
    """A function that prints a line; in a terminal above a progress bar, which ``None`` brings up to date."""
    if not sys.stdout.isatty():
        yield lambda line: line is not None and print(line, flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = ("{task.description}", "{task.fields[figures]}")
    with Progress(TextColumn(columns[0]), BarColumn(), MofNCompleteColumn(), TextColumn(columns[1])) as progress:
        task = progress.add_task("starting", total=None, figures="")

        def show(line: str | None) -> None:
            if line is not None:
                progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            elif status := run.status():
                total = status.total_steps or None
                progress.update(task, description=status.phase, completed=status.step, total=total, figures=figures(status))

        yield show


def figures(status: Status) -> str:
    """Reward, validation, speed and time left of a status, in a few words."""
    words = []
    if status.reward is not None:
        words.append(f"reward {status.reward:.2f}")
    if status.validation is not None:
        words.append(f"validation {status.validation:.2f}")
    if status.seconds_per_step:
        left = status.seconds_per_step * max(0, status.total_steps - status.step)
        words.append(f"{status.seconds_per_step:.1f} s/step, {clock(left)} left")
    return "  ".join(words)


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 42 s, 3 min, 2 h 05."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d}"


def attend(run: RunFolder, plan: JobPlan) -> int:
    """Follow to the end. Ctrl-C stops a local run (it saves first); a Slurm job goes on without its follower."""
    again = False
    while True:
        try:
            follow(run, from_now=again)
            break
        except KeyboardInterrupt:
            if plan.cluster == "slurm":
                print(f"\nthe job goes on: slurmlight logs -f {plan.name} follows it, slurmlight cancel {plan.name} ends it")
                return 130
            again = True
            if pid := guard.living(run):
                print("\nstopping: the run saves at the next step boundary; Ctrl-C again ends it at once", flush=True)
                os.kill(pid, signal.SIGINT)
    return farewell(run)


def farewell(run: RunFolder) -> int:
    """One line on how the run ended, and its exit code."""
    outcome = read_json(run.path / "outcome.json") or {}
    if outcome.get("state") == "finished" or (not outcome and run.finished()):
        return 0
    if not outcome:
        tell(
            f"run {run.name} ended without a word{_slurms_words(run)}; see {run.path / 'submitit'} and launch it again to go on"
        )
        return 1
    tell(
        f"run {run.name} {outcome.get('state')}: {outcome.get('cause')}; {outcome.get('action') or 'launch it again to go on'}"
    )
    return int(outcome.get("code") or {"stopped": 75}.get(str(outcome.get("state")), 1))


def _slurms_words(run: RunFolder) -> str:
    job = read_json(run.job) or {}
    return f" ({slurm.job_state(str(job.get('job_id'))).says})" if job.get("cluster") == "slurm" else ""


def tell(line: str) -> None:
    print(f"slurmlight: {line}", file=sys.stderr, flush=True)
