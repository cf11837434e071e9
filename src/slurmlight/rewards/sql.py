"""Did a predicted query return what the gold query returns? The reward of text-to-SQL: 1 or 0, or no verdict at all.

    execution_match(gold, pred, [Path("concert.sqlite")]) -> Verdict(score=1, kind="match", ...)

Two evaluators by name. ``strict`` is for training: one statement, a query, run as written; rows as a bag, or in order where
the gold has a top-level ORDER BY (ties free); columns in any order; numbers to ten digits. ``official`` gives the verdicts of
the published evaluator, so that papers can be compared (slurmlight.sql.published). Name the evaluator with every score.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from slurmlight.sql import published
from slurmlight.sql.compare import Undecided, same
from slurmlight.sql.execute import DEFAULT, DatabaseBroken, DatabaseMissing, Limits, Result, Row, execute
from slurmlight.sql.order import OrderBy, tie_groups, top_level_order, with_keys

Evaluator = Literal["strict", "official"]
EVALUATORS: tuple[Evaluator, ...] = ("strict", "official")
CACHED_VALUES = 5_000_000  # values of gold results kept per process, the least recently used go first


class Unscorable(Exception):
    """There is no verdict: the gold, the database or the comparison failed, not the prediction. Never a score of 0.

    ``kind``: database, gold_error, gold_timeout, gold_too_large, gold_refused or undecided.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {message}")


@dataclass(frozen=True)
class Verdict:
    """``score`` 1 or 0. ``kind``: match; rows, row_count, columns, order (differ); error, timeout, too_large, refused (failed).

    ``error`` is the short name of the prediction's failure. ``vacuous``: every gold result was empty and the prediction
    returned nothing either, so the score says little (a match of two empty results, or a non-query on an empty gold).
    """

    score: Literal[0, 1]
    kind: str
    reason: str
    vacuous: bool
    evaluator: Evaluator
    error: str = ""


@dataclass(slots=True)
class _Gold:
    sql: str
    columns: tuple[str, ...]
    rows: list[Row]
    order: OrderBy | None
    ties: list[int] | None = field(default=None)
    ties_known: bool = False


def execution_match(
    gold: str,
    pred: str,
    databases: Sequence[Path],
    evaluator: Evaluator = "strict",
    limits: Limits = DEFAULT,
    keep_distinct: bool = False,
) -> Verdict:
    """Compare ``pred`` with ``gold`` on every database; all must match. Raises Unscorable.

    ``keep_distinct`` is the published evaluator's switch of that name; strict always keeps DISTINCT.
    """
    if not databases:
        raise Unscorable("database", "no database given")
    try:
        golds = [_gold(database, gold, evaluator, limits, keep_distinct) for database in databases]
        outcome: tuple[str, str, str] = ("match", "", "")
        silent = True
        for database, expected in zip(databases, golds, strict=True):
            outcome, nothing = _compare(database, expected, pred, evaluator, limits, keep_distinct)
            silent = silent and nothing and not expected.rows
            if outcome[0] != "match":
                break
    except Undecided:
        raise Unscorable("undecided", "no column permutation was found or excluded within the budget") from None
    except (DatabaseMissing, DatabaseBroken) as error:
        raise Unscorable("database", str(error)) from None
    kind, reason, error_name = outcome
    return Verdict(1 if kind == "match" else 0, kind, reason, silent, evaluator, error_name)


def _compare(
    database: Path, gold: _Gold, pred: str, evaluator: Evaluator, limits: Limits, keep_distinct: bool
) -> tuple[tuple[str, str, str], bool]:
    """(kind, reason, error) and whether the prediction returned nothing."""
    limits = replace(limits, max_rows=len(gold.rows))  # one row more is wrong already
    if evaluator == "official":
        text = published.prepared(pred, gold=False, keep_distinct=keep_distinct)
        if not text and not keep_distinct:
            return ("refused", "no SQL in it", "not_a_query"), True
        result = published.run(database, text, limits)
    else:
        result = execute(database, pred, limits)
    nothing = (result.kind == "rows" and not result.rows) or result.error == "not_a_query"
    if result.error == "rows":
        return ("row_count", f"the gold has {len(gold.rows)} rows, the prediction more", ""), nothing
    if result.kind != "rows":
        return (result.kind, result.message, result.error), nothing
    return (
        (*_strict(database, gold, result, limits), "") if evaluator == "strict" else (*_official(gold, result), "")
    ), nothing


def _official(gold: _Gold, pred: Result) -> tuple[str, str]:
    if published.same_result(gold.rows, pred.rows, published.order_matters(gold.sql)):
        return "match", "both empty" if not gold.rows else ""
    return _shape(gold, pred) or ("rows", "the rows differ")


def _strict(database: Path, gold: _Gold, pred: Result, limits: Limits) -> tuple[str, str]:
    if len(gold.columns) != len(pred.columns):
        return "columns", f"the gold has {len(gold.columns)} columns, the prediction {len(pred.columns)}"
    if difference := _shape(gold, pred):
        return difference
    if not gold.rows:
        return "match", "both empty"
    if gold.order is None or len(gold.rows) == 1:
        return ("match", "") if same(gold.rows, pred.rows) else ("rows", "the rows differ")
    if same(gold.rows, pred.rows, range(len(gold.rows))):
        return "match", ""
    if not same(gold.rows, pred.rows):
        return "rows", "the rows differ"
    groups = _ties(database, gold, replace(limits, max_rows=DEFAULT.max_rows))
    if groups and same(gold.rows, pred.rows, groups):
        return "match", "in another order within ties"
    return "order", "the same rows in another order"


def _shape(gold: _Gold, pred: Result) -> tuple[str, str] | None:
    if len(gold.rows) != len(pred.rows):
        return "row_count", f"the gold has {len(gold.rows)} rows, the prediction {len(pred.rows)}"
    if gold.rows and len(gold.rows[0]) != len(pred.rows[0]):
        return "columns", f"the gold has {len(gold.rows[0])} columns, the prediction {len(pred.rows[0])}"
    return None


def _ties(database: Path, gold: _Gold, limits: Limits) -> list[int] | None:
    """The tie group of each gold row; None where the order keys cannot be had."""
    if not gold.ties_known and gold.order is not None:
        written = with_keys(gold.order, gold.columns)
        if written is not None:
            sql, places = written
            result = execute(database, sql, limits) if sql != gold.sql else Result("rows", gold.columns, gold.rows)
            width = len(gold.columns)
            if result.kind == "rows" and sorted(map(repr, gold.rows)) == sorted(repr(row[:width]) for row in result.rows):
                gold.ties = tie_groups(result.rows, places)
        gold.ties_known = True
    return gold.ties


# Gold results are kept by what the database contains, not by where it lies, so that copies share and changes show.

_golds: OrderedDict[tuple[str, str, str], _Gold] = OrderedDict()
_contents: dict[tuple[str, int, int, int], str] = {}
_lock = threading.Lock()
_values = 0


def _gold(database: Path, sql: str, evaluator: Evaluator, limits: Limits, keep_distinct: bool) -> _Gold:
    global _values
    key = (content_identity(database), sql, f"{evaluator} {keep_distinct}")
    with _lock:
        if found := _golds.get(key):
            _golds.move_to_end(key)
            return found
    if evaluator == "official":
        text = published.prepared(sql, gold=True, keep_distinct=keep_distinct)
        result = published.run(database, text, limits) if text else Result("refused", message="no SQL in it")
        gold = _Gold(text, result.columns, result.rows, None)
    else:
        result = execute(database, sql, limits)
        gold = _Gold(sql, result.columns, result.rows, top_level_order(sql))
    if result.kind != "rows":
        raise Unscorable(f"gold_{result.kind}", f"{result.message} [{database.name}]")
    with _lock:
        _golds[key] = gold
        _values += _size(gold)
        while _values > CACHED_VALUES and len(_golds) > 1:
            _values -= _size(_golds.popitem(last=False)[1])
    return gold


def _size(gold: _Gold) -> int:
    return (1 + len(gold.rows)) * max(1, len(gold.columns))


def content_identity(database: Path) -> str:
    """The SHA-256 of the file, in hex, computed once for each (path, inode, size, mtime). Raises DatabaseMissing."""
    try:
        stat = os.stat(database)
        key = (str(database), stat.st_ino, stat.st_size, stat.st_mtime_ns)
        found = _contents.get(key)
        if found is None:
            with open(database, "rb") as file:
                found = _contents[key] = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DatabaseMissing(f"no database at {database} ({error.strerror})", "check the path or import the data") from None
    return found
