"""slurmlight checkpoints: what is on disk, complete or why not, and which step a resume would take."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command()(checkpoints)


def checkpoints(
    run: Annotated[str | None, typer.Argument(help="name or folder of a run; the one launched last by default")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
    accept: Annotated[
        int | None, typer.Option(metavar="STEP", help="let a resume take this step although its data.pt is missing")
    ] = None,
) -> None:
    """Each checkpoint: complete or why not, size, validation, and which one a resume would take."""
    import json

    from slurmlight.runfolder import find_run, readable
    from slurmlight.train import checkpoints as kept

    folder = find_run(run)
    with readable(folder):
        if accept is not None:
            kept.accept(folder.path, accept)
        report = _report(folder)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _show(report)


def _report(run: Any) -> dict[str, Any]:
    from slurmlight.errors import UserError
    from slurmlight.tracking.names import VALIDATION, series
    from slurmlight.train.checkpoints import choose, read_tracker, scan

    world_size = _world_size(run)
    found = scan(run.path, world_size)
    scores = series(run.metric_rows(), VALIDATION)
    try:
        own = next((one.world_size for one in reversed(found) if one.complete), 0)
        resume = choose(found, world_size or own, read_tracker(run.path))
        step, notes, refused = resume.step, list(resume.notes), ""
    except UserError as error:
        step, notes, refused = None, [], str(error)
    steps = [
        {
            "step": one.step,
            "complete": one.complete,
            "flaw": one.flaw,
            "bytes": one.size,
            "world_size": one.world_size,
            "validation": scores.get(one.step),
        }
        for one in found
    ]
    return {"run": run.name, "folder": str(run.path), "resume": step, "refused": refused, "notes": notes, "steps": steps}


def _world_size(run: Any) -> int:
    """The number of processes that will load the shards: one a GPU, one without GPUs; 0 where no plan tells."""
    from slurmlight.files import read_json

    plan = read_json(run.plan)
    return max(plan.get("gpus", 0), 1) * plan.get("nodes", 1) if isinstance(plan, dict) else 0


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if report["steps"]:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, side in (("step", "right"), ("size", "right"), ("GPUs", "right"), ("validation", "right"), ("state", "left")):
            table.add_column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
        for row in report["steps"]:
            score = "" if row["validation"] is None else f"{row['validation']:.3f}"
            resumed = row["complete"] and row["step"] == report["resume"]
            state = "complete" + (", a resume takes this one" if resumed else "") if row["complete"] else row["flaw"]
            style = "bold green" if resumed else "" if row["complete"] else "yellow"
            table.add_row(str(row["step"]), _human(row["bytes"]), str(row["world_size"]), score, Text(state, style))
        console.print(table)
    for note in report["notes"]:
        console.print(note, markup=False, soft_wrap=True)
    if report["refused"]:
        console.print(f"a resume would be refused: {report['refused']}", markup=False, style="red", soft_wrap=True)
    elif not report["steps"]:
        console.print(f"run {report['run']} has no checkpoint: it would start from step 0", markup=False)


def _human(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
