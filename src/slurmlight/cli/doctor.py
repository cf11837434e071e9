"""``slurmlight doctor``: what on this machine would keep a job from running, and the command that mends it."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer


class Stack(StrEnum):
    tiny = "tiny"
    seed = "seed"
    current = "current"


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    stack: Annotated[
        Stack | None, typer.Option(help="package set to compare with; default: the run's, else what is here")
    ] = None,
    run: Annotated[str | None, typer.Option(help="a run (name or folder): its image, GPUs, disk and file system too")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="findings as JSON")] = False,
) -> None:
    """Check this machine: packages, libraries, driver, GPUs, limits, disk, ports. Exit code 0 well, 1 warnings, 2 errors."""
    from slurmlight.doctor import examine, to_json, worst
    from slurmlight.runfolder import find_run

    subject = examine.subject(stack.value if stack else None, find_run(run) if run else None)
    findings = examine.examine(subject)
    if as_json:
        print(json.dumps(to_json(findings), indent=1))
        raise typer.Exit(worst(findings))
    for finding in findings:
        print(f"{finding.severity:<8} {finding.check:<11} {finding.what}")
        if finding.why:
            print(f"{'':20} why:  {finding.why}")
        if finding.mend:
            print(f"{'':20} mend: {finding.mend}")
    counts = [sum(finding.severity == severity for finding in findings) for severity in ("error", "warning")]
    print(f"stack {subject.stack or '(none here)'}: {counts[0]} errors, {counts[1]} warnings")
    raise typer.Exit(worst(findings))
