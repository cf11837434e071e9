"""A database's schema as text for a prompt, chosen to fit a token budget: every table and column name comes first.

text = schema_text(read_schema(Path("concert.sqlite")), budget=2000, question="How many singers are there?")
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from slurmlight.sql.budget import estimate

SAMPLES = 3  # distinct values shown of a column
SAMPLE_CHARS = 40
_SCAN_ROWS = 500  # rows looked at for samples: a big table must not cost seconds
_READ_STEPS = 5_000_000  # VM instructions one schema may cost (about 0.2 s); then samples are left out


class SchemaError(Exception):
    """The schema cannot be shown (no database, no table, or names alone are over the budget): a fault of the task."""


@dataclass(frozen=True)
class Column:
    name: str
    type: str
    primary: bool
    samples: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """``foreign`` holds (column, other table, other column); the last is "" where the file does not name it."""

    name: str
    columns: tuple[Column, ...]
    foreign: tuple[tuple[str, str, str], ...]


Schema = tuple[Table, ...]


def read_schema(database: Path) -> Schema:
    """Tables and views of ``database``, cached until the file changes. Any bytes are tolerated. Raises SchemaError."""
    try:
        stat = database.stat()
    except OSError as error:
        raise SchemaError(f"database {database} cannot be read ({error.strerror})") from None
    return _read(str(database.absolute()), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1024)
def _read(database: str, _mtime: int, _size: int) -> Schema:
    try:
        connection = sqlite3.connect(f"file:{quote(database)}?mode=ro&immutable=1", uri=True)
        try:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            names = connection.execute(
                "SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite~_%' ESCAPE '~' "
                "ORDER BY rowid"
            ).fetchall()
            steps = [_READ_STEPS // 1000]
            tables = [_table(connection, name, steps) if kind == "table" else _view(connection, name) for name, kind in names]
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise SchemaError(f"database {database} cannot be read ({error})") from None
    schema = tuple(table for table in tables if table)
    if not schema:
        raise SchemaError(f"database {database} has no table")
    return schema


def _table(connection: sqlite3.Connection, name: str, steps: list[int]) -> Table:
    columns = tuple(
        Column(column, kind or "", bool(primary), _samples(connection, name, column, steps))
        for _, column, kind, _, _, primary in connection.execute(f"PRAGMA table_info({_quoted(name)})").fetchall()
    )
    keys = connection.execute(f"PRAGMA foreign_key_list({_quoted(name)})").fetchall()
    return Table(name, columns, tuple(sorted((str(key[3]), str(key[2]), str(key[4] or "")) for key in keys)))


def _view(connection: sqlite3.Connection, name: str) -> Table | None:
    """Names and types only: a view's rows may be costly. None for a view of tables that are gone, which no query can use."""
    try:
        rows = connection.execute(f"PRAGMA table_info({_quoted(name)})").fetchall()
    except sqlite3.OperationalError:
        return None
    return Table(name, tuple(Column(row[1], row[2] or "", False, ()) for row in rows), ())


def _samples(connection: sqlite3.Connection, table: str, column: str, steps: list[int]) -> tuple[str, ...]:
    """The first distinct values, as SQL literals; none once the shared allowance of instructions is used up."""

    def count() -> bool:
        steps[0] -= 1
        return steps[0] <= 0

    name = _quoted(column)
    query = (
        f"SELECT DISTINCT substr(value, 1, {SAMPLE_CHARS + 1}), typeof(value) "
        f"FROM (SELECT {name} AS value FROM {_quoted(table)} LIMIT {_SCAN_ROWS}) "
        f"WHERE typeof(value) IN ('integer', 'real', 'text') AND value <> '' LIMIT {SAMPLES}"
    )
    connection.set_progress_handler(count, 1000)
    try:
        return tuple(_literal(value, kind) for value, kind in connection.execute(query))
    except sqlite3.Error:  # interrupted, or a damaged or generated column: the name is still shown
        return ()
    finally:
        connection.set_progress_handler(None, 0)


def _literal(value: str, kind: str) -> str:
    shown = " ".join(value.split())
    if len(shown) > SAMPLE_CHARS:
        shown = shown[:SAMPLE_CHARS] + "..."
    return shown if kind in ("integer", "real") else "'" + shown.replace("'", "''") + "'"


@lru_cache(maxsize=1024)
def compact_text(schema: Schema) -> str:
    """``table(column, column)`` lines: names only."""
    return "\n".join(f"{_name(table.name)}({', '.join(_name(column.name) for column in table.columns)})" for table in schema)


def schema_text(schema: Schema, budget: int, question: str = "") -> str:
    """The fullest text of at most ``budget`` tokens (estimated): all names; then keys, types, samples as far as they fit.

    Samples come column by column, those whose names or values the question mentions first. Raises SchemaError where the
    names alone are over the budget: a schema that lacks a table would teach wrong answers.
    """
    names = estimate(compact_text(schema))
    if names > budget:
        raise SchemaError(f"the names of {len(schema)} tables alone take about {names} tokens of {budget}")
    left = budget - names
    keys = []
    for line in (_foreign_keys(schema), _primary_keys(schema)):
        if line and estimate(f"\n{line}") <= left:
            keys.append(line)
            left -= estimate(f"\n{line}")
    type_cost = sum(estimate(f" {column.type}") for table in schema for column in table.columns if column.type)
    types = type_cost <= left
    left -= type_cost * types
    shown: set[tuple[str, str]] = set()
    for table, column in _by_relevance(schema, question):
        cost = estimate(_sample_text(column)) + 1
        if cost > left:
            break
        shown.add((table.name, column.name))
        left -= cost
    return "\n".join([*(_line(table, types, shown) for table in schema), *keys])


def _line(table: Table, types: bool, shown: set[tuple[str, str]]) -> str:
    parts = []
    for column in table.columns:
        kind = f" {column.type}" if types and column.type else ""
        samples = _sample_text(column) if (table.name, column.name) in shown else ""
        parts.append(f"{_name(column.name)}{kind}{samples}")
    return f"{_name(table.name)}({', '.join(parts)})"


def _sample_text(column: Column) -> str:
    return f" [{', '.join(column.samples)}]"


def _primary_keys(schema: Schema) -> str:
    names = [f"{_name(table.name)}.{_name(column.name)}" for table in schema for column in table.columns if column.primary]
    return f"Primary keys: {', '.join(names)}" if names else ""


def _foreign_keys(schema: Schema) -> str:
    implied = {table.name.lower(): next((c.name for c in table.columns if c.primary), "") for table in schema}
    pairs = []
    for table in schema:
        for column, other, named in table.foreign:
            target = named or implied.get(other.lower(), "")
            pairs.append(f"{_name(table.name)}.{_name(column)} = {_name(other)}" + (f".{_name(target)}" if target else ""))
    return f"Foreign keys: {', '.join(pairs)}" if pairs else ""


def _by_relevance(schema: Schema, question: str) -> list[tuple[Table, Column]]:
    asked = _stems(question)
    low = question.lower()
    scored = []
    for table in schema:
        near = len(asked & _stems(table.name))
        for column in table.columns:
            if not column.samples:
                continue
            hit = any(len(sample) > 4 and sample.strip("'").lower() in low for sample in column.samples)
            text = any(sample.startswith("'") for sample in column.samples)
            score = 4 * hit + 2 * len(asked & _stems(column.name)) + near + 0.5 * text
            scored.append((-score, len(scored), table, column))
    return [(table, column) for _, _, table, column in sorted(scored, key=lambda entry: entry[:2])]


def _stems(text: str) -> set[str]:
    """Lower-case words without a plural's ending; names are cut at underscores and capitals."""
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower()
    return {re.sub(r"ies$", "y", word).rstrip("s") for word in re.findall(r"[^\W_]+", words) if len(word) > 1}


_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RESERVED = frozenset(
    """
    add all alter and as asc between by case check collate column commit constraint create cross current_date current_time
    current_timestamp default deferrable delete desc distinct drop else escape except exists foreign from full group having
    in index inner insert intersect into is isnull join left like limit natural not notnull null offset on or order outer
    primary references right select set table then to transaction union unique update using values when where with
    """.split()  # noqa: SIM905 (72 quoted words would fill the screen)
)


def _name(name: str) -> str:
    """A name as it must be written in SQL."""
    return name if _PLAIN.match(name) and name.lower() not in _RESERVED else _quoted(name)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
