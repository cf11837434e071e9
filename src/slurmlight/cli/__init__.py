"""The command line: one thin file a room, each with ``register(app)``. Heavy imports happen inside the commands."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

import typer
import typer.core

from slurmlight.errors import UserError

ROOMS = ("launch", "runs", "checkpoints", "explain", "presets", "data", "sql", "doctor", "image", "model", "evaluate")


def build() -> typer.Typer:
    typer.core.HAS_RICH = False  # plain help: rich's would cost a third of the time a login node waits for it
    app = typer.Typer(
        name="slurmlight",
        help="Train LLM agents by reinforcement learning as batch jobs that look after themselves.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for room in (r for r in ROOMS if importlib.util.find_spec(f"slurmlight.cli.{r}")):
        importlib.import_module(f"slurmlight.cli.{room}").register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 failed, 2 bad input (one line on stderr), 130 Ctrl-C."""
    try:
        build()(args=list(arguments) if arguments is not None else None)
    except UserError as error:
        from slurmlight.secrets import redact

        print(f"slurmlight: {redact(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `slurmlight status | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


if __name__ == "__main__":
    main()
