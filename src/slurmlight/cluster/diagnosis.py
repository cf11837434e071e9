"""From the end of an attempt to what the supervisor acts on: the log's finding, and what it changes for the next attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmlight.cluster import failures, logfile
from slurmlight.cluster.failures import Finding
from slurmlight.errors import UserError
from slurmlight.files import read_json, write_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder
from slurmlight.secrets import redact


def read(log: Path) -> str:
    """An attempt's log as `slurmlight explain` reads it: of a huge one the beginning and the end. Empty where there is none."""
    try:
        return logfile.read(log).text
    except UserError:
        return ""


def diagnose(plan: JobPlan, log: str, nodes: Sequence[str] = ()) -> Finding | None:
    """The cause that the text of an attempt's ``log`` shows; None where it shows none. ``nodes`` are the job's.

    Secrets of this environment are masked: what is found goes into records and messages.
    """
    found = failures.diagnose(log, nodes=nodes, first_step_s=plan.first_step_s, step_s=plan.step_s)
    return failures.masked(found) if found else None


def last_words(log: str) -> str:
    """The last line in which the kit itself said what is wrong ("slurmlight: ..."), secrets masked; empty without one."""
    lines = [line for line in log.splitlines() if line.startswith("slurmlight: ")]
    return redact(lines[-1].removeprefix("slurmlight: ")) if lines else ""


def adjust(run: RunFolder, finding: Finding, say: Callable[[str], None]) -> None:
    """Change for the next attempt what ``finding`` asks to: RUN/adjustments.json, which the payload lays over its preset.

    Raises OSError.
    """
    path = run.path / "adjustments.json"
    now = read_json(path)
    now = dict(now) if isinstance(now, dict) else {}
    for key, change in finding.adjust.items():
        before = now.get(key, _configured(run, key))
        if not isinstance(before, int | float):
            continue
        after = failures.adjusted(float(before), change)
        if after == before:
            say(f"{key} is {before} already and not lowered further")
            continue
        now[key] = after
        say(f"{finding.cause}: {key} {before} -> {after} from the next attempt on (adjustments.json)")
    if finding.adjust:
        write_json(path, now)


def _configured(run: RunFolder, key: str) -> Any:
    value: Any = read_json(run.config)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
