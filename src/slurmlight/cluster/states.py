"""The one table of Slurm's job states and pending reasons: words of any spelling -> one class. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum


class State(StrEnum):
    """What a job is doing, in the distinctions that matter to who waits for it."""

    WAITING = "waiting"
    HELD = "held"  # pending, needs a release
    BLOCKED = "blocked"  # pending, can never start as it is
    RUNNING = "running"
    ENDING = "ending"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    GONE = "gone"  # no record left
    UNKNOWN = "unknown"


ENDED = frozenset({State.COMPLETED, State.FAILED, State.TIMEOUT, State.CANCELLED})
"""Final wherever they are read. PREEMPTED and NODE_FAIL are not: Slurm may have requeued the job (see slurm.job_state)."""

# Names and codes: squeue(1) and slurm.h of 22.05 to 25.05.
_WORDS: dict[State, str] = {
    State.WAITING: "PENDING PD CONFIGURING CF REQUEUED RQ REQUEUE_FED RF EXPEDITING EX POWER_UP_NODE",
    State.HELD: "REQUEUE_HOLD RH SPECIAL_EXIT SE RESV_DEL_HOLD RD",
    State.RUNNING: "RUNNING R SUSPENDED S STOPPED ST RESIZING RS SIGNALING SI",
    State.ENDING: "COMPLETING CG STAGE_OUT SO",
    State.COMPLETED: "COMPLETED CD",
    State.FAILED: "FAILED F OUT_OF_MEMORY OOM LAUNCH_FAILED",
    State.TIMEOUT: "TIMEOUT TO DEADLINE DL",
    State.CANCELLED: "CANCELLED CA REVOKED RV",
    State.PREEMPTED: "PREEMPTED PR",
    State.NODE_FAIL: "NODE_FAIL NF BOOT_FAIL BF RECONFIG_FAIL",
}
TABLE: dict[str, State] = {word: state for state, words in _WORDS.items() for word in words.split()}

# Where a job has several words (base state and flags), the first of these classes wins.
_RANK = (State.UNKNOWN, State.HELD, State.ENDING, State.WAITING, State.RUNNING, *ENDED, State.PREEMPTED, State.NODE_FAIL)

_HOLDS = re.compile(r"held|hold|special_exit")
_NEVER = re.compile(
    r"dependency_?never_?satisfied|partition_?(node|time)_?limit|bad_?constraints|(max|min)\w*per_?job|min\w*not_?satisfied"
    r"|(account|qos|license)_?not_?allowed|invalid_?(account|qos)|partition_?config"
)
# "FAILED (1)", "CANCELLED by 1001", "OUT_OF_ME+": not part of the word
_EXTRA = re.compile(r"[\s_]+by[\s_]+\S+$|\s*\(.*\)$", re.IGNORECASE)


def classify(words: str | Iterable[str], reason: str = "", priority: int | None = None) -> State:
    """The class of a job's state ``words`` (one text, comma-separated flags or a list), pending ``reason`` and priority.

    A word that is not in the table makes it UNKNOWN, whatever stands beside it.
    """
    parts = re.split(r"[,|]", words) if isinstance(words, str) else [str(word) for word in words]
    found = {_one(part) for part in parts} or {State.UNKNOWN}
    state = min(found, key=lambda one: _RANK.index(one) if one in _RANK else 0)
    return _pending(reason, priority) if state is State.WAITING else state


def _one(word: str) -> State:
    bare = re.sub(r"[\s_-]+", "_", _EXTRA.sub("", word.strip())).upper()
    if bare.endswith("+"):  # cut off by the column width
        found = {state for name, state in TABLE.items() if name.startswith(bare[:-1]) and len(bare) > 3}
        return found.pop() if len(found) == 1 else State.UNKNOWN
    return TABLE.get(bare, State.UNKNOWN)


def _pending(reason: str, priority: int | None) -> State:
    said = plain_reason(reason)
    if _HOLDS.search(said):
        return State.HELD
    if _NEVER.search(said):
        return State.BLOCKED
    # Slurm gives a held job priority 0; the reason may still be that of the time before the hold
    return State.HELD if priority == 0 and said in ("", "none", "priority", "resources") else State.WAITING


def plain_reason(reason: str) -> str:
    """``(launch failed requeued held)`` and ``launch_failed_requeued_held`` are the same reason: the second form."""
    return re.sub(r"[\s_]+", "_", reason.strip().strip("()").strip()).lower()


def together(states: Iterable[State]) -> State:
    """The state of a job whose parts (components, array tasks) have ``states``: alive while one lives, completed only
    when all are."""
    found = list(states)
    for state in (State.UNKNOWN, State.RUNNING, State.ENDING, State.HELD, State.BLOCKED, State.WAITING):
        if state in found:
            return state
    bad = [state for state in found if state is not State.COMPLETED]
    return bad[0] if bad else State.COMPLETED if found else State.UNKNOWN
