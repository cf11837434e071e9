"""slurmlight status, logs, cancel, report: what a run does, said, cost, and how to end it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from slurmlight.cluster.overview import View


def _names(incomplete: str) -> list[str]:
    """For shell completion."""
    from slurmlight.runfolder import all_runs

    return [run.name for run in all_runs() if run.name.startswith(incomplete)]


Run = Annotated[
    str | None, typer.Argument(help="name or folder of a run; the one launched last by default", autocompletion=_names)
]
Json = Annotated[bool, typer.Option("--json", help="for scripts")]


def register(app: typer.Typer) -> None:
    for command in (status, logs, cancel, report):
        app.command()(command)


def status(
    run: Annotated[
        str | None, typer.Argument(help="name or folder of a run; all under checkpoints/ by default", autocompletion=_names)
    ] = None,
    as_json: Json = False,
) -> None:
    """Where each run is: state, attempt, step, reward, speed, time left, newest checkpoint, why it waits, what to do."""
    import json
    from dataclasses import asdict

    from slurmlight.cluster.overview import View, look, look_all
    from slurmlight.runfolder import all_runs, find_run, readable
    from slurmlight.secrets import masked

    if run:
        folder = find_run(run)
        with readable(folder):
            found = [look(folder)]
    else:
        found = look_all(all_runs())
    views = [View(**masked(asdict(view))) for view in found]
    if as_json:
        shown = [asdict(view) for view in views]
        typer.echo(json.dumps(shown[0] if run else shown, indent=1))
    elif views:
        _status_table(views)
    else:
        typer.echo("no runs here yet: python launch.py --preset tiny starts one")


def logs(
    run: Run = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on until the run ends, across attempts")] = False,
) -> None:
    """What all attempts of a run said."""
    from slurmlight.following import LogTail, farewell
    from slurmlight.following import follow as follow_run
    from slurmlight.runfolder import find_run, readable

    folder = find_run(run)
    with readable(folder):
        if not follow:
            for line in LogTail(folder).rest():
                typer.echo(line)
            return
        follow_run(folder)
        raise typer.Exit(farewell(folder))


def cancel(
    run: Run = None,
    now: Annotated[bool, typer.Option("--now", help="do not wait for a save")] = False,
) -> None:
    """End a run's job. It saves first where it runs; launching the same run again goes on from there."""
    from slurmlight.cluster.ending import cancel as end
    from slurmlight.runfolder import find_run, readable

    folder = find_run(run)
    with readable(folder):
        typer.echo(end(folder, now=now))


def report(run: Run = None, as_json: Json = False) -> None:
    """What a run cost: attempts and why each ended, lost steps, where the seconds went, goodput; and its curve."""
    import json

    from slurmlight.reporting import report as gather
    from slurmlight.runfolder import find_run, readable
    from slurmlight.secrets import masked

    folder = find_run(run)
    with readable(folder):
        found = masked(gather(folder))
        if as_json:
            typer.echo(json.dumps(found, indent=1))
            return
        _report_tables(found)
        _print_end(folder)


def _status_table(views: list[View]) -> None:
    from rich.text import Text

    from slurmlight.following import clock

    table = _table("run", "job", "state", "attempt>", "step>", "reward>", "s/step>", "left>", "checkpoint>", "node")
    for view in views:
        total = "?" if view.total_steps is None else str(view.total_steps)
        age = "" if view.checkpoint_age_s is None else f"{view.checkpoint_step}, {clock(view.checkpoint_age_s)} old"
        table.add_row(
            Text(view.run, style="bold"),
            view.job,
            Text(view.says, style=_STYLES.get(view.state, "")),
            str(view.attempts or ""),
            f"{view.step}/{total}",
            "" if view.reward is None else f"{view.reward:.2f}",
            "" if view.seconds_per_step is None else f"{view.seconds_per_step:.1f}",
            "" if view.eta_s is None else clock(view.eta_s),
            age,
            view.node,
        )
    console = _console()
    console.print(table)
    for view in views:
        if view.action:
            console.print(Text(f"{view.run}: {view.action}"), soft_wrap=True)


def _report_tables(found: dict[str, Any]) -> None:
    from rich.text import Text

    from slurmlight.following import clock

    console = _console()
    total = "?" if found["total_steps"] is None else found["total_steps"]
    console.print(Text(f"run {found['run']}: {found['says']}, step {found['step']} of {total}"), soft_wrap=True)
    table = _table("attempt>", "job", "node", "lasted>", "steps>", "lost>", "ended")
    for entry in found["history"]:
        steps = "none" if entry["first_step"] is None else f"{entry['first_step']}-{entry['last_step']}"
        ended = entry["reason"] or entry["ended"]
        row = (entry["attempt"], entry["job"], entry["node"], clock(entry["seconds"]), steps, entry["lost_steps"] or "", ended)
        table.add_row(*map(str, row))
    console.print(table)
    share = "unknown" if found["goodput"] is None else f"{found['goodput']:.0%}"
    console.print(
        f"goodput {share}: {clock(found['useful_s'])} in steps that counted of {clock(found['seconds'])} in attempts; "
        f"{found['lost_steps']} steps lost; {clock(found['waiting_s'])} waiting between attempts",
        soft_wrap=True,
    )
    for title, seconds in (("seconds by phase", found["phases"]), ("seconds by part of a step", found["timing"])):
        if seconds:
            console.print(f"{title}: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()), soft_wrap=True)


def _print_end(folder: Any) -> None:
    """Curve, accuracy and example questions, as at the end of the run."""
    from slurmlight.tracking.summary import end_view, read_report

    if rows := folder.metric_rows():
        _console().print(end_view(rows, *read_report(folder)))


_STYLES = {"running": "green", "finished": "green", "held": "yellow", "blocked": "red", "failed": "red", "lost": "red"}


def _table(*columns: str) -> Any:
    """A plain table; a name that ends in ">" is a column of numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    return table


def _console() -> Any:
    import sys

    from rich.console import Console

    # Without a terminal (a pipe, a log) rich would cut at 80 columns; whole lines are worth more there.
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
