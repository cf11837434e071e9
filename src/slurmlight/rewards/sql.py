"""Did a predicted query return what the gold query returns? The reward of text-to-SQL: 1 or 0, or no verdict at all.

    execution_match(gold, pred, [Path("concert.sqlite")]) -> Verdict(score=1, kind="match", ...)

Two evaluators by name. ``strict`` is for training: one statement, a query, run as written; rows as a bag, or in order where
the gold has a top-level ORDER BY (ties free); columns in any order; numbers to ten digits. ``official`` gives the verdicts of
the published evaluator, so that papers can be compared (slurmlight.sql.published). Name the evaluator with every score.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from slurmlight.sql import published
from slurmlight.sql.compare import Undecided, same
from slurmlight.sql.execute import DEFAULT, DatabaseBroken, DatabaseMissing, Identity, Limits, Result, Row, execute_on, identity
from slurmlight.sql.order import OrderBy, tie_groups, top_level_order, with_keys
from slurmlight.sql.tokens import canonical

Evaluator = Literal["strict", "official"]
EVALUATORS: tuple[Evaluator, ...] = ("strict", "official")
CACHED_VALUES = 5_000_000  # values of gold results kept per process, the least recently used go first
REMEMBERED_OUTCOMES = 100_000
IN_TIES = "in another order within ties"


class Unscorable(Exception):
    """There is no verdict: the gold, the database or the comparison failed, not the prediction. Never a score of 0.

    ``kind``: database, gold_error, gold_timeout, gold_too_large, gold_refused or undecided.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, message
        super().__init__(kind, message)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


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
    """A gold query and its result. ``text`` is what a prediction of the same tokens looks like, ``ordered`` for official."""

    content: str
    sql: str
    text: str
    strict: bool
    keep_distinct: bool
    columns: tuple[str, ...]
    rows: list[Row]
    order: OrderBy | None = None
    ordered: bool = False
    ties: list[int] | None = None
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
    mode = f"{evaluator} {keep_distinct}"
    try:
        files = [identity(database) for database in databases]
        golds = [_gold(file, gold, mode, limits) for file in files]
        outcome, silent = _MATCH, True
        for file, expected in zip(files, golds, strict=True):
            outcome = _judge(file, expected, pred, mode, limits)
            silent = silent and outcome.silent and not expected.rows
            if outcome.kind != "match":
                break
    except Undecided:
        raise Unscorable("undecided", "no column permutation was found or excluded within the budget") from None
    except (DatabaseMissing, DatabaseBroken) as error:
        raise Unscorable("database", str(error)) from None
    return Verdict(1 if outcome.kind == "match" else 0, outcome.kind, outcome.reason, silent, evaluator, outcome.error)


class _Outcome(NamedTuple):
    kind: str
    reason: str = ""
    error: str = ""
    silent: bool = False  # the prediction returned no rows, or is no query


_MATCH = _Outcome("match")
_outcomes: dict[tuple[str, str, str, str], _Outcome] = {}


def _judge(file: Identity, gold: _Gold, pred: str, mode: str, limits: Limits) -> _Outcome:
    """The outcome on one database; remembered, since samples of one question repeat each other."""
    text = canonical(pred) if gold.strict else pred
    if gold.strict and text == gold.text:
        return _Outcome("match", "the gold's own text", "", not gold.rows)
    key = (gold.content, gold.sql, text, mode)
    outcome = _outcomes.get(key)
    if outcome is None:
        outcome = _run_and_compare(file, gold, pred, limits)
        if outcome.kind != "timeout" and outcome.error != "memory":
            if len(_outcomes) >= REMEMBERED_OUTCOMES:
                _outcomes.clear()
            _outcomes[key] = outcome
    return outcome


def _run_and_compare(file: Identity, gold: _Gold, pred: str, limits: Limits) -> _Outcome:
    cap = len(gold.rows)  # one row more is wrong already
    if gold.strict:
        result = execute_on(file, pred, limits, cap)
    else:
        text = published.prepared(pred, gold=False, keep_distinct=gold.keep_distinct)
        if not text and not gold.keep_distinct:
            return _Outcome("refused", "no SQL in it", "not_a_query", True)
        result = published.run(file, text, limits, cap)
    if result.kind == "rows":
        kind, reason = _strict(file, gold, result, limits) if gold.strict else _official(gold, result)
        return _Outcome(kind, reason, "", not result.rows)
    if result.error == "rows":
        return _Outcome("row_count", f"the gold has {cap} rows, the prediction more")
    return _Outcome(result.kind, result.message, result.error, result.error == "not_a_query")


def _official(gold: _Gold, pred: Result) -> tuple[str, str]:
    if published.same_result(gold.rows, pred.rows, gold.ordered):
        return "match", "both empty" if not gold.rows else ""
    return _shape(gold, pred) or ("rows", "the rows differ")


def _strict(file: Identity, gold: _Gold, pred: Result, limits: Limits) -> tuple[str, str]:
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
    groups = _ties(file, gold, limits)
    if groups and same(gold.rows, pred.rows, groups):
        return "match", IN_TIES
    return "order", "the same rows in another order"


def _shape(gold: _Gold, pred: Result) -> tuple[str, str] | None:
    if len(gold.rows) != len(pred.rows):
        return "row_count", f"the gold has {len(gold.rows)} rows, the prediction {len(pred.rows)}"
    if gold.rows and len(gold.rows[0]) != len(pred.rows[0]):
        return "columns", f"the gold has {len(gold.rows[0])} columns, the prediction {len(pred.rows[0])}"
    return None


def _ties(file: Identity, gold: _Gold, limits: Limits) -> list[int] | None:
    """The tie group of each gold row; None where the order keys cannot be had."""
    if not gold.ties_known and gold.order is not None:
        written = with_keys(gold.order, gold.columns)
        if written is not None:
            sql, places = written
            result = (
                execute_on(file, sql, limits, len(gold.rows)) if sql != gold.sql else Result("rows", gold.columns, gold.rows)
            )
            width = len(gold.columns)
            if result.kind == "rows" and sorted(map(repr, gold.rows)) == sorted(repr(row[:width]) for row in result.rows):
                gold.ties = tie_groups(result.rows, places)
        gold.ties_known = True
    return gold.ties


# Gold results are kept by what the database contains, not by where it lies, so that copies share and changes show.

_golds: OrderedDict[tuple[str, str, str], _Gold] = OrderedDict()
_contents: dict[Identity, str] = {}
_lock = threading.Lock()
_values = 0


def _gold(file: Identity, sql: str, mode: str, limits: Limits) -> _Gold:
    key = (content_identity(file), sql, mode)
    with _lock:
        if found := _golds.get(key):
            _golds.move_to_end(key)
            return found
    gold = _run_gold(file, sql, mode, limits, key[0])
    global _values
    with _lock:
        _golds[key] = gold
        _values += _size(gold)
        while _values > CACHED_VALUES and len(_golds) > 1:
            _values -= _size(_golds.popitem(last=False)[1])
    return gold


def _run_gold(file: Identity, sql: str, mode: str, limits: Limits, content: str) -> _Gold:
    evaluator, keep_distinct = mode.split()[0], mode.endswith("True")
    if evaluator == "official":
        text = published.prepared(sql, gold=True, keep_distinct=keep_distinct)
        result = published.run(file, text, limits, limits.max_rows) if text else Result("refused", message="no SQL in it")
        gold = _Gold(content, sql, text, False, keep_distinct, result.columns, result.rows, None, published.order_matters(text))
    else:
        result = execute_on(file, sql, limits, limits.max_rows)
        gold = _Gold(content, sql, canonical(sql), True, True, result.columns, result.rows, top_level_order(sql))
    if result.kind != "rows":
        raise Unscorable(f"gold_{result.kind}", f"{result.message} [{Path(file[0]).name}]")
    return gold


def _size(gold: _Gold) -> int:
    return (1 + len(gold.rows)) * max(1, len(gold.columns))


def content_identity(file: Identity) -> str:
    """The SHA-256 of the file, in hex, computed once for each identity. Raises DatabaseMissing."""
    found = _contents.get(file)
    if found is None:
        try:
            with open(file[0], "rb") as data:
                found = _contents[file] = hashlib.file_digest(data, "sha256").hexdigest()
        except OSError as error:
            raise DatabaseMissing(f"cannot read {file[0]} ({error.strerror})", "check the path or import the data") from None
    return found
