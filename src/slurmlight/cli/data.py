"""slurmlight data: make the toy data, import Spider."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    data = typer.Typer(help="Make or import the data to train on.", no_args_is_help=True)
    app.add_typer(data, name="data")

    @data.command()
    def toy(
        out: Annotated[Path, typer.Option(help="folder to write")] = Path("data/toy"),
        seed: Annotated[int, typer.Option(min=0, help="seed of rows and questions")] = 0,
    ) -> None:
        """Generate the tiny preset's databases and questions (a second call finds them whole and does nothing)."""
        from slurmlight.data import toy

        wrote = toy.ensure(out, seed)
        rows = ", ".join(f"{name} {count}" for name, count in toy.counts(out).items())
        names = ", ".join(domain.name for domain in toy.DOMAINS if domain.name not in toy.UNSEEN)
        typer.echo(f"{out}: {'written' if wrote else 'already there'}, seed {seed}")
        typer.echo(f"  questions: {rows}")
        typer.echo(f"  databases: {names}; never trained on: {', '.join(toy.UNSEEN)}; two instances each")
