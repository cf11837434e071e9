"""A log as it really is -> plain lines of the current attempt, and where training moved on in them. Pure.

Real logs hold colours, progress bars that rewrite their line, binary junk, and several attempts one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

MARKER = "=== slurmlight attempt "
LINE_LIMIT = 4000
"""Characters of a line that are looked at: no message is longer, and patterns stay linear on junk without newlines."""
NEW_ATTEMPT_S = 60.0
"""After Slurm ends a job only KillWait (30 s) passes; a requeue waits 120 s. A later time stamp is of the next attempt."""

_MARKER = re.compile(r"(?:^|\s)=== slurmlight attempt (\d+) ===\s*$")
_KIT = re.compile(r"^\[[\w -]+\] \+[\d.]+ s\b")  # the supervisor's own remarks, which may quote an earlier cause
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
    r"|\[(?:\d;)?(?:0|1|3\d|9\d)m"  # what is left of a colour where a tool took the escape character away
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TIME = re.compile(r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?: std(?:out|err) [FP])? ")
_RANK = re.compile(r"^(?:\(\S+(?: pid=\d+)?(?:, ip=[\w.:]+)?\)\s|\[rank ?\d+\]:\s?|\[default\d+\]:\s?|\d+:\s)+")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")
_JOB_ENDED = re.compile(
    r"\*\*\* JOB \S+ ON \S+ CANCELLED AT (\S+) DUE TO (?:PREEMPTION|JOB REQUEUE|NODE FAILURE)", re.IGNORECASE
)
_BAR = re.compile(r"(?P<label>[^|]*?)\d+%\|[^|]*\|\s*(?P<done>\d+)/(?P<total>\d+)\s*\[(?P<elapsed>[\d:]+)<")
_STEP = re.compile(r"\b(?:global_)?step[ :=]+(?P<done>\d+)\b(?!\.\d+ (?:ON|STEPD)\b)", re.IGNORECASE)  # not "STEP 5.0 ON node"
_OTHER_BARS = re.compile(
    r"load|captur|map|generat|download|fetch|filter|token|sav|shard|valid|eval|compil|process|render", re.IGNORECASE
)


@dataclass(frozen=True)
class Progress:
    """A line that says how far training is. ``elapsed`` are the seconds a progress bar shows, None elsewhere."""

    line: int
    done: int
    elapsed: float | None = None


@dataclass(frozen=True)
class Attempt:
    """The current attempt's ``lines``; ``first`` is the number of the first of them in the whole text, from 1."""

    number: int | None
    first: int
    lines: Sequence[str]


def current_attempt(text: str) -> Attempt:
    """The part of ``text`` after the last attempt marker; without markers, after the last end of a job by Slurm that is
    followed by another attempt."""
    lines = clean(text)
    number, start = None, 0
    for at, line in enumerate(lines):
        if MARKER in line and (match := _MARKER.search(line)):
            number, start = int(match[1]), at + 1
    if number is None:
        start = _after_requeue(lines)
    return Attempt(number, start + 1, ["" if _KIT.match(line) else line for line in lines[start:]])


def clean(text: str) -> list[str]:
    """The lines of ``text`` without colours and control characters; each state of a progress bar is a line."""
    plain = _CONTROL.sub("", _ESCAPES.sub("", text)) if _ESCAPES.search(text) or _CONTROL.search(text) else text
    return [line if len(line) <= LINE_LIMIT else line[:LINE_LIMIT] for line in re.split(r"\r\n|[\n\r]", plain)]


def without_rank(line: str) -> tuple[str, str]:
    """``(WorkerDict pid=7) text``, ``[rank0]: text`` or ``3: text`` as (who, text); a time stamp before it is left out."""
    line = _TIME.sub("", line)
    match = _RANK.match(line)
    return (match[0], line[match.end() :]) if match else ("", line)


def stamp(line: str) -> float | None:
    """The time a line carries, as seconds since the epoch (local time)."""
    match = _STAMP.search(line)
    try:
        return datetime.fromisoformat(f"{match[1]}T{match[2]}").timestamp() if match else None
    except ValueError:
        return None


def progress(lines: Sequence[str]) -> list[Progress]:
    """Where training says how far it is: its progress bar or ``step: N`` lines, not bars of loading or validation."""
    found: list[Progress] = []
    for at, line in enumerate(lines):
        if "%|" in line and (bar := _BAR.search(line)):
            if not _OTHER_BARS.search(bar["label"]):
                found.append(Progress(at, int(bar["done"]), _clock(bar["elapsed"])))
        elif "tep" in line and (step := _STEP.search(line)):
            found.append(Progress(at, int(step["done"])))
    return found


def _after_requeue(lines: Sequence[str]) -> int:
    """Without markers Slurm's own lines part the attempts: all but the last do, the last one if time went on after it."""
    ends = [(at, stamp(match[1])) for at, line in enumerate(lines) if (match := _JOB_ENDED.search(line))]
    if not ends:
        return 0
    last, when = ends[-1]
    for at in range(last + 1, len(lines)):
        later = stamp(lines[at])
        if when and later and later - when > NEW_ATTEMPT_S:
            return at
    return ends[-2][0] + 1 if len(ends) > 1 else 0


def _clock(text: str) -> float:
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part or 0)
    return float(seconds)
