"""RUN/outcome.json: how a run's job ended for good, for people and for `status`. Absent while the run is on its way."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from slurmlight.cluster import attempts
from slurmlight.cluster.attempts import Log
from slurmlight.cluster.decide import PEOPLE, Decision, End
from slurmlight.cluster.ends import BAD_CONFIG, STOPPED
from slurmlight.files import write_json
from slurmlight.runfolder import RunFolder

FAILED, INTERRUPTED = 1, 130
BARREN_DEATHS = 3  # supervisors killed in a row without a step in between


def path(run: RunFolder) -> Path:
    return run.path / "outcome.json"


def write(run: RunFolder, decision: Decision, end: End, *, at_once: bool = False) -> int:
    """Say how the job ended, in the file and in one line on stderr. Returns the exit code that goes with it."""
    person = end.stop_reason in PEOPLE
    state = "finished" if decision.verdict == "done" else "stopped" if person else "failed"
    text = f"run {run.name} {state} at step {end.step}"
    if state != "finished":
        text += f": {decision.why}" + (f"; {decision.action}" if decision.action else "")
    code = 0 if state == "finished" else STOPPED if person else BAD_CONFIG if end.kind == "bad config" else FAILED
    if person and at_once:
        code = INTERRUPTED
    with suppress(OSError):
        record = {"state": state, "cause": decision.why, "action": decision.action, "code": code}
        write_json(path(run), record | {"step": end.step, "time": time.time()})
    print(f"slurmlight: {text}", file=sys.stderr, flush=True)
    return code


def give_up(run: RunFolder, job: str, how: str) -> bool:
    """After a supervisor of ``job`` was killed (``how``): whether that has happened too often without a step."""
    mine = [attempt for attempt in attempts.close_lost(run, attempts.load(run)) if attempt.job == job]
    if mine:
        Log(attempts.log_path(run, mine[-1].attempt), mine[-1].started).phase("guard", how)
    last = mine[-BARREN_DEATHS:]
    hopeless = not mine or (len(last) == BARREN_DEATHS and all(one.kind == attempts.LOST and not one.steps for one in last))
    if hopeless:
        why = f"{how}, again and again without a step" if mine else f"{how} before it could begin"
        write(run, Decision("stop", why, "see what kills it (memory?), then launch the same run again"), End("lost"))
    return hopeless
