"""What a run cost: its attempts and why each ended, steps done twice, where the seconds went, goodput. For `report`."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from slurmlight.cluster import overview
from slurmlight.cluster.attempts import Attempt
from slurmlight.runfolder import RunFolder
from slurmlight.tracking.names import SECONDS, number


def report(run: RunFolder) -> dict[str, Any]:
    """Everything `slurmlight report --json` prints: the run's view, ``history`` (one entry an attempt) and the seconds.

    ``goodput`` is the seconds of the steps that counted by the seconds of all attempts (None before the first step):
    starts, lost steps and hangs lower it, waiting for Slurm does not and is given apart as ``waiting_s``.
    """
    view = overview.look(run)
    known = overview.history(run, view.state in ("running", "ending"))
    lost = overview.lost(run, known, view.state in ("running", "ending"))
    rows = run.metric_rows()
    useful = sum(value for row in rows if row["step"] > 0 and (value := number(row, SECONDS)) is not None)
    spent = sum(attempt.seconds for attempt in known)
    return asdict(view) | {
        "history": [_entry(attempt, steps) for attempt, steps in zip(known, lost, strict=True)],
        "seconds": round(spent, 1),
        "waiting_s": round(_waiting(known), 1),
        "useful_s": round(useful, 1),
        "goodput": round(min(1.0, useful / spent), 3) if useful and spent else None,
        "phases": _phases(known),
        "timing": _timing(rows),
    }


def _entry(attempt: Attempt, lost: int) -> dict[str, Any]:
    return {
        "attempt": attempt.attempt,
        "job": attempt.job,
        "node": attempt.node,
        "started": attempt.started,
        "seconds": round(attempt.seconds, 1),
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "lost_steps": lost,
        "ended": (attempt.kind or "runs") if attempt.ended else "runs",
        "reason": attempt.reason,
        "cause": attempt.cause,
        "exit_code": attempt.exit_code,
    }


def _waiting(known: list[Attempt]) -> float:
    """Seconds between the end of an attempt and the start of the next."""
    return sum(max(0.0, after.started - (before.ended or time.time())) for before, after in pairwise(known))


def _phases(known: list[Attempt]) -> dict[str, float]:
    """Seconds by the payload's own phases, over all attempts, most first; "start" is what came before its first beat."""
    total: dict[str, float] = {}
    for attempt in known:
        for name, seconds in attempt.phases.items():
            total[name] = round(total.get(name, 0.0) + seconds, 1)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _timing(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of the steps that counted by part (the engines' timing_s metrics)."""
    total: dict[str, float] = {}
    for row in rows:
        for name in row:
            if name.startswith("timing_s/") and (value := number(row, name)) is not None and row["step"] > 0:
                total[name.removeprefix("timing_s/")] = total.get(name.removeprefix("timing_s/"), 0.0) + value
    return {name: round(seconds, 1) for name, seconds in total.items()}
