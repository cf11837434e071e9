"""slurmlight explain LOGFILE: the first cause in any log, the line that shows it, what to do next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    @app.command()
    def explain(
        logfile: Annotated[Path, typer.Argument(help="a log of a job: the kit's, Slurm's, Ray's, or anyone's")],
        as_json: Annotated[
            bool, typer.Option("--json", help="for scripts: cause, evidence, action ...; null where none")
        ] = False,
    ) -> None:
        """Name the cause of a failure from its log. Only the last attempt in it counts; a healthy log has no finding."""
        from slurmlight.cluster.failures import diagnose, masked
        from slurmlight.cluster.logfile import read

        log = read(logfile)
        found = diagnose(log.text)
        found = masked(found) if found else None
        if as_json:
            names = ("cause", "detail", "evidence", "action", "requeue", "attempt")
            value = {name: getattr(found, name, None) for name in names}
            typer.echo(json.dumps(value | {"line": log.line_number(found.line) if found else None}, ensure_ascii=False))
            return
        if log.gap:
            typer.echo(f"(the last attempt is long: its beginning and its end were read, not {log.gap} lines in between)")
        if found is None:
            typer.echo(f"{logfile}: nothing found that is known to go wrong")
            return
        where = f"line {log.line_number(found.line)}" + (f", attempt {found.attempt}" if found.attempt else "")
        typer.echo(f"cause     {found.title}")
        typer.echo(f"evidence  {where}: {found.evidence}")
        typer.echo(f"action    {found.action}")
