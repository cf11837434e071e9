"""End a run's job on a person's word: a Slurm job or a local one, saved first where it runs."""

from __future__ import annotations

import os
import signal
import time

from slurmlight.cluster import guard, overview, slurm
from slurmlight.errors import UserError
from slurmlight.files import read_json
from slurmlight.runfolder import RunFolder, StopRequest

SAVE_WAIT_S = 20.0  # for the next step boundary; scancel then leaves Slurm's KillWait more
POLL_S = 0.2


def cancel(run: RunFolder, *, now: bool) -> str:
    """End the job of ``run``; returns one line on what was done. Raises UserError where no job is there to end.

    The stop request goes first: a payload that reaches a step boundary in time saves there. ``now`` does not wait.
    """
    view = overview.look(run)
    if view.state not in ("running", "ending", "waiting", "held", "blocked", "unknown"):
        raise UserError(f"run {run.name} has no job to cancel ({view.says})", "slurmlight status shows all runs")
    record = read_json(run.job)
    if isinstance(record, dict) and record.get("cluster") == "slurm":
        return _slurm(run, view.state, str(record.get("job_id")), now)
    return _local(run, now)


def _slurm(run: RunFolder, state: str, job: str, now: bool) -> str:
    if state == "running":
        _ask(run)
        if not now and _ended(run, SAVE_WAIT_S):
            return f"run {run.name} saved and stopped; job {job} is over"
    slurm.cancel(job)
    return f"job {job} of run {run.name} cancelled"


def _local(run: RunFolder, now: bool) -> str:
    pid = guard.living(run)
    if pid is None:
        holder = guard.owner(run) or {}
        raise UserError(f"run {run.name} does not run on this machine", f"cancel it on {holder.get('node', 'its node')}")
    _ask(run)
    os.kill(pid, signal.SIGINT)
    if now:
        time.sleep(1.0)  # two at once would count as one
        if guard.living(run) == pid:
            os.kill(pid, signal.SIGINT)
    if _ended(run, SAVE_WAIT_S):
        return f"run {run.name} stopped"
    return f"run {run.name} stops when it has saved, at the next step boundary; --now does not wait for that"


def _ask(run: RunFolder) -> None:
    try:
        run.request_stop(StopRequest("cancel", max(run.attempt_numbers(), default=0)))
    except OSError as error:
        raise UserError(f"run folder {run.path} cannot be written ({error.strerror})", "cancel it as its owner") from None


def _ended(run: RunFolder, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if read_json(run.path / "outcome.json") and guard.living(run) is None:
            return True
        time.sleep(POLL_S)
    return False
