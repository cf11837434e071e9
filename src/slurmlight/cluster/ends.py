"""How an attempt ended: exit code, finish mark, stop request and log -> decide.End."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from slurmlight.cluster import diagnosis, space
from slurmlight.cluster.attempts import Attempt, Log
from slurmlight.cluster.decide import End, Kind
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder

STOPPED, BAD_CONFIG, SEGFAULT = 75, 2, 139  # exit codes of the payload: saved, go on later; refused; 128 + SIGSEGV
_KINDS: dict[int, Kind] = {STOPPED: "stopped", BAD_CONFIG: "bad config", 0: "unfinished"}
_FREE = "free space there, then launch the same run again"


def judge(run: RunFolder, plan: JobPlan, log: Log, *, code: int, hung: str, stop_reason: str, nodes: Sequence[str] = ()) -> End:
    """The end of a payload that left ``code``; ``hung`` is what the watchdog said, ``stop_reason`` why it had to stop,
    ``nodes`` the job's.

    Only the finish mark counts as finished, not exit code 0. What the log's finding changes for the next attempt is written.
    """
    kind: Kind = "finished" if run.finished() else "hang" if hung else _KINDS.get(code, "crash")
    end = End(kind, stop_reason=stop_reason, exit_code=code, cause=hung)
    if kind in ("finished", "stopped"):
        return end
    text = diagnosis.read(log.path)
    if found := diagnosis.diagnose(plan, text, nodes):
        log.phase("cause", f"{found.title}: {found.evidence}")
        with suppress(OSError):
            diagnosis.adjust(run, found, log.line)
        return replace(end, cause=found.title, action=found.action, hopeless=not found.requeue)
    if said := diagnosis.last_words(text):
        return replace(end, cause=hung or said)
    if code == SEGFAULT:
        return replace(
            end, action="compare Python and C library of image and host (slurmlight doctor)", cause="segmentation fault"
        )
    return end


def wait_for_space(run: RunFolder, end: End, log: Log, sleep: Callable[[float], bool]) -> End:
    """After a full disk: coming back helps as soon as there is room, and not before. ``sleep`` says whether to go on."""
    lack = space.lacking(run)
    if end.kind in ("finished", "stopped") or not (lack or end.cause in space.CAUSES):
        return end
    if lack and end.cause not in space.CAUSES:  # too full even for a word in the log
        end = replace(end, cause=f"disk full ({lack})", action=_FREE)
    end = replace(end, hopeless=True)
    minutes = space.WAIT_S / 60
    print(f"slurmlight: {end.cause}: waiting up to {minutes:.0f} minutes for room in {run.path}", file=sys.stderr, flush=True)
    if end.stop_reason or not space.wait(run, sleep):
        return end
    log.phase("space", "there is room again")
    return replace(end, hopeless=False)


def fields(end: End) -> dict[str, object]:
    """What an attempt's record keeps of ``end``."""
    return {"kind": end.kind, "stop_reason": end.stop_reason, "cause": end.cause, "exit_code": end.exit_code}


def with_steps(attempt: Attempt, end: End | None = None) -> End:
    """``end`` (by default as the record has it) with what the record knows of steps."""
    if end is None:
        kind: Kind = attempt.kind  # type: ignore[assignment]
        end = End(kind, stop_reason=attempt.stop_reason, exit_code=attempt.exit_code, cause=attempt.cause)
    step = attempt.complete_step if attempt.last_step is None else attempt.last_step
    return replace(end, step=step, made_step=attempt.steps > 0, complete_step=attempt.complete_step)
