"""``slurmlight doctor``: does this machine, this Python, this node hold what the job needs? Nothing here needs a GPU.

Each check is a pure function over gathered facts and yields Findings. Modules import the standard library and the host half
only, so the doctor runs where nothing else is installed yet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["ok", "warning", "error"]
EXIT_CODES: dict[Severity, int] = {"ok": 0, "warning": 1, "error": 2}


@dataclass(frozen=True)
class Finding:
    """What was found, why it matters and the command or step that mends it (both empty where all is well)."""

    check: str
    severity: Severity
    what: str
    why: str = ""
    mend: str = ""


def worst(findings: list[Finding]) -> int:
    """The exit code: 0 all well, 1 warnings, 2 errors."""
    return max((EXIT_CODES[finding.severity] for finding in findings), default=0)


def to_json(findings: list[Finding]) -> dict[str, Any]:
    return {"exit_code": worst(findings), "findings": [asdict(finding) for finding in findings]}
