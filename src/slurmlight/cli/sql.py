"""slurmlight sql: check one pair of gold and predicted SQL, score a file of predictions."""

from __future__ import annotations

import json
import math
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slurmlight.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurmlight.rewards.pairs import Pair
    from slurmlight.rewards.score import Scored
    from slurmlight.sql.execute import Limits

WORKERS = min(4, os.cpu_count() or 1)


class Evaluator(StrEnum):
    strict = "strict"
    official = "official"


def _seconds(value: float) -> float:
    if math.isnan(value):  # it is neither below the minimum nor above the maximum
        raise UserError("--timeout nan is no number of seconds", "give one from 0.01 to 600")
    return value


TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.01, max=600, help="seconds for each query", callback=_seconds)]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def register(app: typer.Typer) -> None:
    sql = typer.Typer(help="Run, compare and score SQL safely.", no_args_is_help=True)
    app.add_typer(sql, name="sql")

    @sql.command()
    def check(
        db: Annotated[Path, typer.Option(help="a .sqlite file, or a folder of several instances")],
        gold: Annotated[str, typer.Option(help="the gold query")],
        pred: Annotated[str, typer.Option(help="the predicted query")],
        timeout: TimeoutOption = 5.0,
        as_json: JsonOption = False,
    ) -> None:
        """Show both results, the verdicts of both evaluators and why."""
        from slurmlight.cli import sql_text
        from slurmlight.rewards.pairs import Pair
        from slurmlight.rewards.score import judge
        from slurmlight.sql.execute import Limits
        from slurmlight.sql.worker import Worker

        try:
            databases = sorted(db.glob("*.sqlite")) if db.is_dir() else [db]
        except OSError as error:
            raise UserError(f"cannot look at {db} ({error.strerror})", "check the path") from None
        if not databases:
            raise UserError(f"{db} holds no *.sqlite file", "give a database file or the folder of its instances")
        limits = Limits(timeout_s=timeout)
        with Worker() as worker:
            results = {name: worker.execute(databases[0], text, limits) for name, text in (("gold", gold), ("pred", pred))}
            pair = Pair(0, db.stem, gold, pred)
            judged = {name.value: judge(worker, pair, databases, _literal(name), limits, False) for name in Evaluator}
        if as_json:
            typer.echo(json.dumps(sql_text.check_json(databases, results, judged)))
        else:
            sql_text.print_check(results, judged)

    @sql.command()
    def score(
        gold: Annotated[Path, typer.Option(help="gold file: a line is SQL, a tab, the db_id")],
        pred: Annotated[Path, typer.Option(help="prediction file: one a line, an empty line for none")],
        db_dir: Annotated[Path, typer.Option(help="folder with DB_ID/*.sqlite; several files are several instances")],
        out: Annotated[Path, typer.Option(help="folder for verdicts.parquet")],
        evaluator: Annotated[Evaluator, typer.Option(help="strict, or official to compare with papers")] = Evaluator.strict,
        keep_distinct: Annotated[bool, typer.Option("--keep-distinct", help="official: do not strip DISTINCT")] = False,
        compare: Annotated[bool, typer.Option("--compare", help="count why the other evaluator differs")] = False,
        workers: Annotated[int, typer.Option(min=1, max=256, help="processes that judge")] = WORKERS,
        timeout: TimeoutOption = 5.0,
        as_json: JsonOption = False,
    ) -> None:
        """Score predictions: accuracy by hardness, errors by kind, and every verdict in OUT/verdicts.parquet."""
        from slurmlight.cli import sql_text
        from slurmlight.rewards.pairs import database_set, instances, read_pairs
        from slurmlight.rewards.score import differences, summary, write_verdicts
        from slurmlight.sql.execute import Limits

        pairs = read_pairs(gold, pred)
        if not any(instances(db_dir, db_id) for db_id in {pair.db_id for pair in pairs}):
            raise UserError(f"{db_dir} holds no database of these golds", "give the folder that holds DB_ID/DB_ID.sqlite")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {out} ({error.strerror})", "give another --out") from None
        limits = Limits(timeout_s=timeout)
        scored = _score(evaluator, pairs, db_dir, workers, limits, keep_distinct)
        name = database_set(db_dir, (pair.db_id for pair in pairs))
        report = summary(scored, _literal(evaluator), keep_distinct, name)
        if compare:
            other = Evaluator.official if evaluator is Evaluator.strict else Evaluator.strict
            rest = _score(other, pairs, db_dir, workers, limits, keep_distinct)
            report["differences"] = differences(*((scored, rest) if evaluator is Evaluator.strict else (rest, scored)))
        write_verdicts(out / "verdicts.parquet", scored)
        if as_json:
            typer.echo(json.dumps(report))
        else:
            sql_text.print_report(report, scored, out)


def _literal(evaluator: Evaluator) -> Literal["strict", "official"]:
    return "strict" if evaluator is Evaluator.strict else "official"


def _score(
    evaluator: Evaluator, pairs: Sequence[Pair], db_dir: Path, workers: int, limits: Limits, keep_distinct: bool
) -> list[Scored]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from slurmlight.rewards.score import score

    columns: Any = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{evaluator.value} evaluator", total=len(pairs))
        advance = lambda: progress.advance(task)  # noqa: E731
        return score(pairs, db_dir, _literal(evaluator), workers, limits, keep_distinct, advance)
