"""Parquet files of questions: written atomically, read with errors that name the file and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmlight.errors import UserError
from slurmlight.files import write_atomic

COLUMNS = ("question", "db_id", "query")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises OSError (disk full, no permission)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), sink)
    write_atomic(path, sink.getvalue().to_pybytes())


def read_rows(path: Path, mend: str = "make it with `slurmlight data`") -> list[dict[str, Any]]:
    """All rows of ``path``; UserError where it is missing, no parquet, empty or lacks one of question, db_id, query."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise UserError(f"data file {path} does not exist", mend) from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"data file {path} cannot be read as parquet ({_first_line(error)})", mend) from None
    lacking = [name for name in COLUMNS if name not in table.column_names]
    if lacking:
        raise UserError(f"data file {path} has no column {', '.join(lacking)} (has: {', '.join(table.column_names)})", mend)
    rows = table.to_pylist()
    if not rows:
        raise UserError(f"data file {path} has no rows", mend)
    for number, row in enumerate(rows):
        if not all(isinstance(row[name], str) and row[name].strip() for name in COLUMNS):
            raise UserError(f"data file {path}, row {number}: question, db_id and query must be text", mend)
    return rows


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
