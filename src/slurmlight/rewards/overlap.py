"""Partial credit: how much of the gold's result an answer returns, and how many of its tables and columns it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from slurmlight.rewards.judged import Judged
from slurmlight.sql.execute import Row, execute
from slurmlight.sql.schema import Schema, read_schema
from slurmlight.sql.tokens import tokenize

NO_MATCH = 0.9  # the most that results can overlap without a match: the right rows in a wrong order


def execution_similarity(judged: Judged) -> float:
    """1 for a match; otherwise the mean over the databases of ``overlap`` of the two results, at most 0.9.

    Where the answer fails on a database, that one counts 0.
    """
    if judged.verdict.score:
        return 1.0
    if not judged.databases or not judged.episode.answer.strip():
        return 0.0
    found = [_on(database, judged) for database in judged.databases]
    return min(NO_MATCH, sum(found) / len(found))


def _on(database: Path, judged: Judged) -> float:
    gold = execute(database, judged.gold, judged.limits)
    answer = execute(database, judged.episode.answer, judged.limits)
    return overlap(gold.rows, answer.rows) if gold.kind == answer.kind == "rows" else 0.0


def overlap(gold: Sequence[Row], answer: Sequence[Row]) -> float:
    """Jaccard similarity of two results as bags: of rows (values in any order) where they are equally wide, else of values."""
    if not gold or not answer:
        return 0.0
    if len(gold[0]) == len(answer[0]):
        return jaccard((_as_bag(row) for row in gold), (_as_bag(row) for row in answer))
    return jaccard((_plain(cell) for row in gold for cell in row), (_plain(cell) for row in answer for cell in row))


def jaccard(one: Iterable[Any], other: Iterable[Any]) -> float:
    """Size of the common part of two bags, of the size of both together; 0 for two empty bags."""
    left, right = Counter(one), Counter(other)
    both, either = (left & right).total(), (left | right).total()
    return both / either if either else 0.0


def _as_bag(row: Row) -> tuple[Any, ...]:
    return tuple(sorted(map(_plain, row), key=repr))


def _plain(value: Any) -> Any:
    """Numbers that print alike to ten digits are alike, as for execution match."""
    if isinstance(value, int | float) and isfinite(value):
        return float(f"{value:.10g}") + 0.0
    return value


def schema_linking(judged: Judged) -> float:
    """Jaccard similarity of the tables and columns that gold and answer name, as sets of names."""
    if not judged.databases:
        return 0.0
    schema = read_schema(judged.databases[0])
    return jaccard(linked(judged.gold, schema), linked(judged.episode.answer, schema))


def linked(sql: str, schema: Schema) -> set[str]:
    """The names of tables and columns of ``schema`` that stand in ``sql``, in lower case. A literal is no name."""
    names = {table.name.lower() for table in schema} | {column.name.lower() for table in schema for column in table.columns}
    words = {token.text.strip('"`[]').lower() for token in tokenize(sql) if token.kind in ("word", "name")}
    return names & words
