"""What a JobRecord means for people and for the kit: state, whether it is final, plain words, what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slurmlight.cluster.records import JobRecord
from slurmlight.cluster.states import ENDED, State, classify, plain_reason, together

SETTLE_S = 300.0
"""A job that accounting calls preempted or lost may come back: final only when it is out of the queue for this long."""

Source = Literal["queue", "accounting", "run folder", "nothing"]


@dataclass(frozen=True)
class Verdict:
    """The state of one job. ``final``: no further attempt follows by itself. ``says`` is the state in plain words,
    ``hint`` what a person can do ("" where nothing), ``notes`` what was wrong with the evidence."""

    job: str
    state: State
    final: bool
    source: Source
    word: str = ""
    reason: str = ""
    says: str = ""
    hint: str = ""
    nodes: str = ""
    restarts: int | None = None
    exit_code: str = ""
    name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def attempt(self) -> int | None:
        """Which attempt this is, from 1; None where Slurm does not tell."""
        return None if self.restarts is None else self.restarts + 1


def from_queue(record: JobRecord) -> Verdict:
    """What the controller says of a job. PREEMPTED there is a moment before the requeue, so is a requeueable NODE_FAIL."""
    state = classify(record.words, record.reason, record.priority)
    lost_for_good = state is State.NODE_FAIL and record.requeue is False
    return _verdict(record, state, state in ENDED or lost_for_good, "queue")


def from_accounting(record: JobRecord, now: float) -> Verdict:
    """What the database says of a job that is not in the queue, at ``now`` (seconds since the epoch)."""
    state = classify(record.words)
    settled = record.end_time is not None and now - record.end_time > SETTLE_S
    final = state in ENDED or (state in (State.PREEMPTED, State.NODE_FAIL) and settled)
    return _verdict(record, state, final, "accounting")


def without_record(job: str, finished: bool) -> Verdict:
    """No one knows the job any more: the finish mark in the run folder tells success from loss."""
    if finished:
        return Verdict(job, State.COMPLETED, True, "run folder", says="finished")
    says = "lost: Slurm has no record of it and the run is not finished"
    return Verdict(
        job, State.GONE, True, "nothing", says=says, hint="launch the same run again: it goes on from its checkpoints"
    )


def of_parts(job: str, parts: Sequence[Verdict]) -> Verdict:
    """One verdict for a job of several components or tasks; its words are those of the part that decides."""
    state = together(part.state for part in parts)
    decisive = next(part for part in parts if part.state is state)
    return replace(decisive, job=job, state=state, final=all(part.final for part in parts))


def _verdict(record: JobRecord, state: State, final: bool, source: Source) -> Verdict:
    says, hint = _advice(record, state)
    return Verdict(
        job=str(record.id),
        state=state,
        final=final,
        source=source,
        word=",".join(record.words),
        reason=record.reason,
        says=says,
        hint=hint,
        nodes=record.nodes,
        restarts=record.restarts,
        exit_code=record.exit_code,
        name=record.name,
    )


def _advice(record: JobRecord, state: State) -> tuple[str, str]:
    """The state in plain words, and what to do about it."""
    reason = plain_reason(record.reason)
    if state in (State.HELD, State.BLOCKED, State.WAITING):
        return _pending(record, state, reason)
    if state is State.FAILED and reason == "joblaunchfailure" and record.exit_code.endswith(":53"):
        return "failed: the output folder cannot be written on the node", "put the run folder on a file system the nodes share"
    if state is State.FAILED and reason == "badconstraints":
        return "refused by Slurm, never started: no node can give what was asked", "ask for less, or for another partition"
    if state is State.CANCELLED and reason == "dependencyneversatisfied":
        return f"cancelled by Slurm: job {_parents(record)} did not end as asked", "launch both again"
    if state is State.CANCELLED and (by := re.search(r"by[\s_]+(\S+)", " ".join(record.words))):
        return f"cancelled by uid {by[1]}", ""
    word = ", ".join(record.words)
    plain = {
        State.RUNNING: "running",
        State.ENDING: "ending: its processes are being stopped",
        State.COMPLETED: "completed",
        State.FAILED: f"failed ({word}, exit code {record.exit_code})" if record.exit_code else f"failed ({word})",
        State.TIMEOUT: "ended by the time limit",
        State.CANCELLED: "cancelled",
        State.PREEMPTED: "preempted",
        State.NODE_FAIL: "its node failed",
    }.get(state, f"unknown state {word!r}")
    hint = {State.TIMEOUT: "ask for more time, or let the kit requeue before the limit"}.get(state, "")
    return ("suspended" if word.upper() in ("SUSPENDED", "S", "STOPPED", "ST") else plain), hint


def _pending(record: JobRecord, state: State, reason: str) -> tuple[str, str]:
    job = record.id
    if reason == "launch_failed_requeued_held":
        hint = f"scontrol release {job}; its node was drained by its prolog: exclude that node (sinfo -R names it)"
        return "held: it could not be launched on its node", hint
    if reason == "jobheldadmin":
        return "held by an administrator", "only an administrator can release it: ask them"
    if state is State.HELD:
        return f"held ({record.reason or record.words[0]})", f"scontrol release {job}"
    if reason == "dependencyneversatisfied":
        return (
            f"can never start: job {_parents(record)} did not end as asked",
            f"scancel {job}, then submit without that dependency",
        )
    if state is State.BLOCKED:
        limit = {"partitionnodelimit": "more nodes than the partition's node limit"}.get(reason, record.reason)
        return f"can never start: {limit}", f"scancel {job}, then ask for what the partition offers (scontrol show partition)"
    if reason == "begintime" and record.restarts:
        return f"requeued, attempt {record.restarts + 1} waits; about 2 minutes are normal (Slurm's cred_expire, 120 s)", ""
    return _WHY.get(reason, f"waits ({record.reason})" if reason not in ("", "none") else "waits"), ""


def _parents(record: JobRecord) -> str:
    return ", ".join(dict.fromkeys(re.findall(r"\d+(?:_\d+)?", record.dependency))) or "its dependency"


_WHY = {
    "resources": "waits for free nodes",
    "priority": "waits behind jobs of higher priority",
    "dependency": "waits for another job",
    "begintime": "waits for its begin time",
    "jobarraytasklimit": "waits for other tasks of its array",
    "partitiondown": "waits: its partition is down",
    "partitioninactive": "waits: its partition is inactive",
}
