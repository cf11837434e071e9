"""slurmlight data: make the toy data, import Spider."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slurmlight.data.spider import Report, Split

NAMED = 10  # left-out databases and golds named a file


class Databases(StrEnum):
    copy = "copy"
    link = "link"


def register(app: typer.Typer) -> None:
    data = typer.Typer(help="Make or import the data to train on.", no_args_is_help=True)
    app.add_typer(data, name="data")

    @data.command()
    def toy(
        out: Annotated[Path | None, typer.Option(help="folder to write; default: data/toy, where the presets look")] = None,
        seed: Annotated[int, typer.Option(min=0, help="seed of rows and questions")] = 0,
    ) -> None:
        """Generate the tiny preset's databases and questions (a second call finds them whole and does nothing)."""
        from slurmlight.data import toy
        from slurmlight.runfolder import home

        out = out or home() / "data/toy"
        wrote = toy.ensure(out, seed)
        rows = ", ".join(f"{name} {count}" for name, count in toy.counts(out).items())
        names = ", ".join(domain.name for domain in toy.DOMAINS if domain.name not in toy.UNSEEN)
        typer.echo(f"{out}: {'written' if wrote else 'already there'}, seed {seed}")
        typer.echo(f"  questions: {rows}")
        typer.echo(f"  databases: {names}; never trained on: {', '.join(toy.UNSEEN)}; two instances each")

    @data.command()
    def spider(
        source: Annotated[
            Path, typer.Option("--from", help="unpacked Spider download: train_spider.json, dev.json, database/")
        ],
        out: Annotated[Path | None, typer.Option(help="folder to write; default: data, where the presets look")] = None,
        databases: Annotated[
            Databases, typer.Option(help="how database/ is filled; a link must be visible in the container")
        ] = (Databases.copy),
    ) -> None:
        """Import Spider: rows whose database is there and whose gold query runs; what is left out is named."""
        from rich.console import Console

        from slurmlight.data.spider import import_spider
        from slurmlight.runfolder import home

        out = out or home() / "data"
        with Console(stderr=True).status("reading") as status:
            report = import_spider(
                source,
                out,
                databases.value,
                lambda name, done, rows: status.update(f"running golds of {name}: {done} of {rows}"),
            )
        typer.echo("\n".join(describe(report, out)))


def describe(report: Report, out: Path) -> list[str]:
    lines = [f"{out / 'database'}: {report.databases} databases"]
    for split in report.splits:
        lines += _describe_split(split, out)
    return lines + [f"not used: {problem}" for problem in report.problems]


def _describe_split(split: Split, out: Path) -> list[str]:
    databases = len({row["db_id"] for row in split.rows})
    what = f"{len(split.rows)} of {split.total} rows, {databases} databases ({split.source})" if split.rows else "not written"
    lines = [f"{out / split.name}.parquet: {what}"]
    if split.note:
        lines.append(f"  note: {split.note}")
    if split.no_database:
        named = [
            f"{db_id} {rows}" for db_id, rows in sorted(split.no_database.items(), key=lambda entry: (-entry[1], entry[0]))
        ]
        lines.append(f"  left out, no usable database: {sum(split.no_database.values())} rows: {_listed(named)}")
    if split.failed:
        lines.append(f"  left out, the gold query does not run: {len(split.failed)}")
        lines += [f"    {line}" for line in split.failed[:NAMED]]
        if len(split.failed) > NAMED:
            lines.append(f"    and {len(split.failed) - NAMED} more")
    return lines


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
