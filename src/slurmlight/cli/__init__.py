"""The command line: one thin file a room, each with ``register(app)``. Heavy imports happen inside the commands."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click
import typer
import typer.core
import typer.main

from slurmlight.errors import UserError

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
ROOMS = ("launch", "runs", "checkpoints", "explain", "presets", "data", "sql", "doctor", "image", "model", "evaluate")


def build() -> typer.Typer:
    typer.core.HAS_RICH = False  # plain help: rich's would cost a third of the time a login node waits for it
    app = typer.Typer(
        name="slurmlight",
        help="Train LLM agents by reinforcement learning as batch jobs that look after themselves.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=HELP,
    )
    for room in (r for r in ROOMS if importlib.util.find_spec(f"slurmlight.cli.{r}")):
        importlib.import_module(f"slurmlight.cli.{room}").register(app)
    return app


def main(arguments: Sequence[str] | None = None, command: str = "") -> None:
    """Run a command and exit: 0 done, 1 failed, 2 bad input (one line on stderr), 130 Ctrl-C.

    ``command``: a program of its own that is this one command (launch.py), so that its help and errors name it.
    """
    try:
        sys.exit(_run(list(arguments) if arguments is not None else None, command))
    except UserError as error:
        _refuse(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        words = " ".join(error.format_message().split()).rstrip(".")
        context = error.ctx if isinstance(error, click.UsageError) else None
        _refuse(f"{words}; see {context.command_path} --help" if context else words, UserError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:  # `slurmlight status | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # of a place that somebody named, or whose rights nobody had thought of
        if error.filename is None:
            raise
        _refuse(f"{error.filename}: {error.strerror}", UserError.exit_code)


def _run(arguments: list[str] | None, command: str) -> int | None:
    program = typer.main.get_command(build())
    if not command:
        return program.main(args=arguments, standalone_mode=False)
    assert isinstance(program, click.Group)
    return program.commands[command].main(args=arguments, standalone_mode=False, **HELP)


def _refuse(text: str, code: int) -> NoReturn:
    """One line on stderr: a name with a line break in it must not make two."""
    from slurmlight.secrets import redact

    line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in redact(text))
    print(f"slurmlight: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
