"""What follows the end of an attempt: requeue, stop or done. A pure function of that end and of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["finished", "stopped", "crash", "hang", "unfinished", "bad config", "bad node", "lost"]
FAILURES: frozenset[str] = frozenset({"crash", "hang", "unfinished", "bad node"})
PEOPLE = ("cancel", "interrupt", "launcher gone")  # stop requests of a person: never answered by coming back
TIME_LIMIT = "time limit"


@dataclass(frozen=True)
class End:
    """How an attempt ended. ``step``: the last one it did, or where it stood; ``made_step``: it did at least one.

    ``complete_step`` is the newest checkpoint then, ``stop_reason`` why it had been asked to stop ("" if it had not),
    ``cause`` and ``action`` the diagnosis of its log, ``hopeless``: that diagnosis says coming back cannot help.
    """

    kind: Kind
    step: int = 0
    made_step: bool = False
    complete_step: int = 0
    stop_reason: str = ""
    exit_code: int | None = None
    cause: str = ""
    action: str = ""
    hopeless: bool = False

    @property
    def failed(self) -> bool:
        """A failure of its own: not one that a stop request explains (a payload killed while it saves, say)."""
        return self.kind in FAILURES and not self.stop_reason

    @property
    def barren(self) -> bool:
        """Did no step, by its own fault or because its time limit is too short. A preemption or a bad node is no fault."""
        if self.made_step or self.kind in ("finished", "lost", "bad node"):
            return False
        return self.stop_reason == TIME_LIMIT or not self.stop_reason


@dataclass(frozen=True)
class Decision:
    verdict: Literal["requeue", "stop", "done"]
    why: str
    action: str = ""


def decide(end: End, history: Sequence[End], *, restarts: int, cap: int, requeue: bool) -> Decision:
    """What to do after ``end``; ``history`` holds the earlier ends of the same job, oldest first.

    ``restarts`` is how often this job has come back (SLURM_RESTART_COUNT); those that ``history`` shows to be no failures
    (preemptions, say) do not count against ``cap``, the number of requeues allowed after failures.
    """
    if end.kind == "finished":
        return Decision("done", "finished")
    if end.stop_reason in PEOPLE:
        return Decision("stop", f"stopped on request ({end.stop_reason})", "launch the same run again to go on")
    if end.kind == "bad config":
        return Decision("stop", end.cause or "the configuration is refused", end.action or "correct it and launch again")
    if loop := _crash_loop([*history, end]):
        return Decision("stop", f"crash loop: {loop}" + (f" ({end.cause})" if end.cause else ""), _person(end))
    if end.failed and end.hopeless:
        return Decision("stop", end.cause, _person(end))
    if not requeue:
        return Decision("stop", f"{_words(end)}, and requeue is off", "launch the same run again to go on")
    if not end.failed:
        return Decision("requeue", _words(end))
    benign = sum(not earlier.failed for earlier in history)
    used = max(0, restarts - benign)
    if used >= cap:
        return Decision("stop", f"{_words(end)}; cap reached: {used} of {cap} requeues after failures used", _person(end))
    return Decision("requeue", f"{_words(end)}; failure {used + 1} of at most {cap + 1}")


def _crash_loop(ends: Sequence[End]) -> str:
    """Why going on is pointless, or "". Preemptions and lost nodes in between neither count nor break a row."""
    rows = [end for end in ends if end.failed or end.barren or end.made_step]
    if len(rows) >= 2 and all(end.barren for end in rows[-2:]):
        return "two attempts in a row made no step"
    failed = [end for end in rows if end.failed][-3:]
    if len(failed) == 3 and ends[-1].failed:
        first, *later = failed
        if all(end.complete_step == first.complete_step and end.step <= first.step for end in later):
            return f"three attempts failed at or before step {first.step} without a new checkpoint"
    return ""


def _person(end: End) -> str:
    return end.action or "read the newest attempt's log (slurmlight logs RUN), mend the cause, launch the same run again"


def _words(end: End) -> str:
    if end.stop_reason:
        return f"stopped at step {end.step} ({end.stop_reason})"
    code = f" with exit code {end.exit_code}" if end.exit_code is not None else ""
    text = {
        "stopped": f"payload stopped at step {end.step}",
        "crash": f"payload failed{code} at step {end.step}",
        "hang": f"payload hung at step {end.step}",
        "unfinished": "payload ended with exit code 0 but without the finish mark",
        "bad node": "this node does not work",
        "lost": "node or supervisor died",
    }.get(end.kind, end.kind)
    return f"{text}: {end.cause}" if end.cause else text
