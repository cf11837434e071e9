"""What a person or a script sees of a run: state in plain words, how far it is, what it waits for, what to do.

Reads the run folder and, where a job is on its way, Slurm. Nothing here fails on a torn or foreign folder; a file that
may not be read is an OSError, but for the list of all runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlight.cluster import attempts, guard, slurm
from slurmlight.cluster.attempts import Attempt
from slurmlight.cluster.states import State
from slurmlight.cluster.verdicts import Verdict
from slurmlight.errors import UserError
from slurmlight.files import read_json
from slurmlight.runfolder import RunFolder

AGAIN = "launch the same run again: it goes on from its newest checkpoint"
FRESH_S = 300.0  # a heartbeat younger than this speaks for a run when Slurm says nothing


@dataclass(frozen=True)
class View:
    """One run now. ``state``: finished, running, waiting, held, blocked, ending, stopped, failed, cancelled, timeout,
    lost, new or unknown; ``says`` the same in plain words, ``action`` what a person can do ("": nothing).

    Times are seconds; None where nobody knows. ``lost_steps`` are steps that had to be, or will have to be, done again.
    """

    run: str
    job: str
    node: str
    state: str
    step: int
    total_steps: int | None
    attempts: int
    restarts: int
    lost_steps: int
    cause: str
    says: str
    action: str
    phase: str
    reward: float | None
    validation: float | None
    seconds_per_step: float | None
    eta_s: float | None
    checkpoint_step: int
    checkpoint_age_s: float | None
    heartbeat_age_s: float | None
    folder: str


def look_all(runs: Iterable[RunFolder]) -> list[View]:
    """The views of ``runs``, one that cannot be read among them; a Slurm that does not answer is waited for once, not once a
    run."""
    views, silent = [], False
    for run in runs:
        try:
            view, silent = _look(run, silent)
        except OSError as error:
            view = _unreadable(run, error)
        views.append(view)
    return views


def look(run: RunFolder) -> View:
    return _look(run, False)[0]


def history(run: RunFolder, running: bool) -> list[Attempt]:
    """The run's attempts, those that could not write their end closed; the last one is left open while it runs."""
    known = attempts.load(run)
    closed = attempts.close_lost(run, known)
    return [*closed[:-1], known[-1]] if running and known and known[-1].ended is None else closed


def lost(run: RunFolder, known: list[Attempt], running: bool) -> list[int]:
    """Lost steps of each attempt; for a run that is not finished those since the newest checkpoint count too."""
    goes_on = not running and not run.finished()
    return attempts.lost_steps(known, resumes_from=attempts.newest_checkpoint(run) if goes_on else None)


def _look(run: RunFolder, silent: bool) -> tuple[View, bool]:
    job = _dict(run.job)
    state, says, action, verdict = _state(run, job, silent)
    silent = silent or (verdict is not None and verdict.state is State.UNKNOWN)
    running = state in ("running", "ending")
    known = history(run, running)
    last = known[-1] if known else None
    outcome = _dict(run.path / "outcome.json") if state not in ("running", "waiting") else {}
    status = run.status()
    finished = run.finished() or {}
    step = int(finished.get("step") or (status.step if status else 0))
    total = status.total_steps if status else None
    pace = status.seconds_per_step if status else None
    now = time.time()
    checkpoint = attempts.newest_checkpoint(run)
    return View(
        run=run.name,
        job=str(job.get("job_id") or (last.job if last else "")),
        node=(verdict.nodes if verdict and verdict.nodes else "") or (last.node if last else ""),
        state=state,
        step=step,
        total_steps=total,
        attempts=len(run.attempt_numbers()),
        restarts=_restarts(verdict, last, len(known)),
        lost_steps=sum(lost(run, known, running)),
        cause="" if state == "finished" else str(outcome.get("cause") or (last.cause if last else "")),
        says=says,
        action=action,
        phase=status.phase if status and running else "",
        reward=status.reward if status else None,
        validation=status.validation if status else None,
        seconds_per_step=pace,
        eta_s=pace * max(0, total - step) if running and pace is not None and total is not None else None,
        checkpoint_step=checkpoint,
        checkpoint_age_s=_age(run.path / f"global_step_{checkpoint}", now),
        heartbeat_age_s=max(0.0, now - status.time) if status and running else None,
        folder=str(run.path),
    ), silent


def _unreadable(run: RunFolder, error: OSError) -> View:
    name = Path(str(error.filename)).name if error.filename else "a file"
    return View(
        run=run.name,
        job="",
        node="",
        state="unknown",
        step=0,
        total_steps=None,
        attempts=0,
        restarts=0,
        lost_steps=0,
        cause="",
        says=f"unreadable: {name} ({error.strerror})",
        action=f"mend {error.filename or run.path}, or look as the run's owner",
        phase="",
        reward=None,
        validation=None,
        seconds_per_step=None,
        eta_s=None,
        checkpoint_step=0,
        checkpoint_age_s=None,
        heartbeat_age_s=None,
        folder=str(run.path),
    )


def _state(run: RunFolder, job: dict[str, Any], silent: bool) -> tuple[str, str, str, Verdict | None]:
    """State, words, action, and Slurm's verdict where it was asked. Finish mark, then outcome, then Slurm decide."""
    if run.finished():
        return "finished", "finished", "", None
    outcome = _dict(run.path / "outcome.json")
    if outcome and float(job.get("submitted") or 0) < float(outcome.get("time") or 0):
        state, cause = str(outcome.get("state", "failed")), str(outcome.get("cause", ""))
        return state, f"{state}: {cause}", str(outcome.get("action") or AGAIN), None
    if job.get("cluster") == "slurm":
        return _slurm(run, str(job.get("job_id", "")), silent)
    if guard.living(run):
        return "running", "running on this machine", "", None
    if run.attempt_numbers():
        return "lost", "its supervisor is gone and left no word", AGAIN, None
    return "new", "not started yet", "", None


def _slurm(run: RunFolder, job: str, silent: bool) -> tuple[str, str, str, Verdict | None]:
    verdict = None
    if not silent:
        try:
            verdict = slurm.job_state(job)
        except UserError as error:
            return "unknown", f"job.json names no Slurm job ({error.what})", AGAIN, None
    if verdict is None or verdict.state is State.UNKNOWN:
        status = run.status()
        why = verdict.says if verdict else "unknown: Slurm does not answer"
        if status and time.time() - status.time < FRESH_S:
            return "running", f"its heart beats ({why})", "", verdict
        return "unknown", why, "ask again where Slurm answers (scontrol ping)", verdict
    state = {State.GONE: "lost", State.COMPLETED: "failed"}.get(verdict.state, verdict.state.value)
    says = "its job ended without finishing the run" if verdict.state is State.COMPLETED else verdict.says
    return state, says, verdict.hint or (AGAIN if verdict.final else ""), verdict


def _restarts(verdict: Verdict | None, last: Attempt | None, count: int) -> int:
    if verdict and verdict.restarts is not None:
        return verdict.restarts
    if last is None:
        return 0
    return count - 1 if last.job.startswith("local-") else last.restarts


def _age(path: Path, now: float) -> float | None:
    try:
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None


def _dict(path: Path) -> dict[str, Any]:
    value = read_json(path)
    return value if isinstance(value, dict) else {}
