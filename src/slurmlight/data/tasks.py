"""Rows of a parquet file as SqlTasks: what an engine trains, validates and tests on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from slurmlight.agents.contract import SqlTask
from slurmlight.data.parquet import read_rows
from slurmlight.errors import UserError


def load_tasks(
    parquet: Path | str,
    databases: Path | str | None = None,
    *,
    instances: int = 1,
    max_turns: int = 3,
    query_timeout_s: float = 5.0,
    limit: int | None = None,
) -> list[SqlTask]:
    """The tasks of ``parquet``, in file order. ``databases`` (default: ``database`` beside the file) holds DB/DB.sqlite.

    ``task.database`` is the first instance; with ``instances`` > 1 ``task.extra["instances"]`` lists the others
    (DB/DB-2.sqlite, ...) as strings. Other columns of the file are in ``task.extra``. ``task_id`` is "STEM/ROW".
    Raises UserError for a file that is missing, corrupt or without the columns, and for databases that are not there.
    """
    path = Path(parquet)
    home = Path(databases) if databases is not None else path.parent / "database"
    rows = read_rows(path)[:limit]
    _check_databases(path, home, Counter(row["db_id"] for row in rows), instances)
    return [_task(row, f"{path.stem}/{number}", home, instances, max_turns, query_timeout_s) for number, row in enumerate(rows)]


def database_path(home: Path, db_id: str, instance: int = 1) -> Path:
    """Where instance ``instance`` (from 1) of a database lies."""
    return home / db_id / (f"{db_id}.sqlite" if instance == 1 else f"{db_id}-{instance}.sqlite")


def _task(row: dict[str, Any], task_id: str, home: Path, instances: int, max_turns: int, timeout_s: float) -> SqlTask:
    extra = {key: value for key, value in row.items() if key not in ("question", "db_id", "query")}
    if instances > 1:
        extra["instances"] = [str(database_path(home, row["db_id"], number)) for number in range(2, instances + 1)]
    return SqlTask(
        task_id=task_id,
        question=row["question"],
        db_id=row["db_id"],
        database=database_path(home, row["db_id"]),
        gold=row["query"],
        max_turns=max_turns,
        query_timeout_s=timeout_s,
        extra=extra,
    )


def _check_databases(parquet: Path, home: Path, used: Counter[str], instances: int) -> None:
    for db_id in used:
        if Path(db_id).name != db_id or db_id in (".", ".."):
            raise UserError(f"data file {parquet}: db_id {db_id!r} cannot name a folder", "correct the file")
    missing = {
        db_id: rows
        for db_id, rows in used.items()
        if not all(_is_database(database_path(home, db_id, number)) for number in range(1, instances + 1))
    }
    if missing:
        named = ", ".join(sorted(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise UserError(
            f"{sum(missing.values())} of {used.total()} rows of {parquet} have no usable database under {home}: {named}",
            "import the data again with `slurmlight data`",
        )


def _is_database(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(16) == b"SQLite format 3\x00"
    except OSError:
        return False
