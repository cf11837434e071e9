"""A read-only SQLite connection that hostile SQL cannot use for anything but reading: allow-list, limits, deadline.

Each guard stops something the others let through (a read-only file alone still runs ATTACH, VACUUM INTO and PRAGMA):

* URI ``mode=ro&immutable=1``: the file cannot change, no lock is taken, no journal is made;
* authorizer: SELECT, READ (no sqlite_* tables), RECURSIVE and listed functions, nothing else; it also watches the deadline,
  because nested CTEs can expand for ever while a statement is prepared, before the progress handler is ever asked;
* limits on values, text, depth and columns; a progress handler for the deadline; sorts in memory; a heap limit.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote

HEAP_BYTES = 512 << 20  # all of SQLite's memory in this process; it can only be lowered once set
PROGRESS_STEPS = 1000  # VM instructions between two looks at the clock, about 30 us; costs 14 % on a long query

# One C call of these takes (length of one argument) x (length of another) steps and no handler interrupts a C call:
# a statement that names one gets shorter values.
QUADRATIC = ("instr", "replace", "trim", "glob", "like")
QUADRATIC_BYTES = 50_000

CLOCK_FUNCTIONS = ("date", "time", "datetime", "julianday", "unixepoch", "strftime")
FUNCTIONS = frozenset(
    """
    count sum total avg min max group_concat
    abs round sign ceil ceiling floor trunc mod pow power sqrt exp ln log log2 log10 pi degrees radians
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh
    length lower upper substr substring instr replace trim ltrim rtrim like glob unicode char hex quote soundex
    coalesce ifnull nullif iif typeof likely unlikely likelihood
    row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value nth_value
    json json_array json_array_length json_extract json_object json_quote json_type json_valid -> ->>
    json_group_array json_group_object
    """.split()
).union(CLOCK_FUNCTIONS)
DANGEROUS = frozenset(("load_extension", "fts3_tokenizer", "sqlite_log", "printf", "format"))
_SECRET_TABLES = ("sqlite_", "pragma_", "dbstat")

_WORDS = {
    value: name.removeprefix("SQLITE_").replace("_", " ")
    for name, value in vars(sqlite3).items()
    if re.match(
        r"SQLITE_(CREATE|DROP|ALTER|ATTACH|DETACH|ANALYZE|REINDEX|PRAGMA|SAVEPOINT|TRANSACTION|DELETE|INSERT|UPDATE)", name
    )
}


@dataclass(frozen=True)
class Policy:
    """What a statement may do. ``functions`` is the allow-list; None allows all but the dangerous ones and the clock's."""

    functions: frozenset[str] | None = FUNCTIONS
    schema_tables: bool = False  # sqlite_master and its like may be read
    clock: bool = False  # 'now', CURRENT_DATE and the like may be asked
    value_bytes: int = 1_000_000
    sql_bytes: int = 20_000
    expression_depth: int = 200
    compound_select: int = 50
    like_pattern: int = 1000
    columns: int = 200
    vm_steps: int = 25_000


STRICT = Policy()


@dataclass(slots=True)
class State:
    """What the guards of one connection saw during the current statement."""

    deadline: float = 0.0  # time.monotonic() seconds
    late: bool = False
    denied: str = ""  # the first thing that was refused, in words


@dataclass(slots=True)
class Guarded:
    """A guarded connection, its observations and its policy: used by one thread at a time."""

    connection: sqlite3.Connection
    state: State
    policy: Policy


def connect(database: Path, policy: Policy = STRICT) -> Guarded:
    """A guarded connection to an existing file. Raises sqlite3.Error where the file cannot be opened or is no database."""
    uri = f"file:{quote(str(database.absolute()))}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=0, check_same_thread=False)
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return guard(connection, policy)


def guard(connection: sqlite3.Connection, policy: Policy) -> Guarded:
    """Put every guard but the read-only file on a fresh connection."""
    for pragma in ("query_only=1", "temp_store=2", f"hard_heap_limit={HEAP_BYTES}"):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    for limit, value in (
        (sqlite3.SQLITE_LIMIT_LENGTH, policy.value_bytes),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, policy.sql_bytes),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, policy.expression_depth),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, policy.compound_select),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, policy.like_pattern),
        (sqlite3.SQLITE_LIMIT_COLUMN, policy.columns),
        (sqlite3.SQLITE_LIMIT_VDBE_OP, policy.vm_steps),
        (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.setlimit(limit, value)
    state = State()
    if not policy.clock:
        _stop_clock(connection, state)
    connection.set_progress_handler(_progress(state), PROGRESS_STEPS)
    connection.set_authorizer(_authorizer(state, policy))
    return Guarded(connection, state, policy)


def _progress(state: State) -> Callable[[], bool]:
    def late() -> bool:
        if monotonic() > state.deadline:
            state.late = True
        return state.late

    return late


def _authorizer(state: State, policy: Policy) -> Callable[..., int]:
    ok, deny, functions = sqlite3.SQLITE_OK, sqlite3.SQLITE_DENY, policy.functions
    select, read, function, recursive = (
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
    )

    def allowed(action: int, first: str | None, second: str | None, database: str | None, inside: str | None) -> int:
        if monotonic() > state.deadline:
            state.late = True
            return deny
        if action == read:
            if policy.schema_tables or not (first or "").lower().startswith(_SECRET_TABLES):
                return ok
            state.denied = state.denied or f"reading {first}"
        elif action == select or action == recursive:
            return ok
        elif action == function:
            if second in functions if functions is not None else second not in DANGEROUS:
                return ok
            state.denied = state.denied or f"function {second}"
        else:
            state.denied = state.denied or _WORDS.get(action, f"action {action}")
        return deny

    return allowed


def _stop_clock(connection: sqlite3.Connection, state: State) -> None:
    """Date functions that refuse to tell the time: a verdict must be the same tomorrow. All else goes to SQLite's own."""
    helper = sqlite3.connect(":memory:", check_same_thread=False)

    def call(name: str, *arguments: Any) -> Any:
        times = arguments[1:] if name == "strftime" else arguments
        if not times or any(isinstance(value, str) and value.strip().lower() == "now" for value in times[:1]):
            state.denied = state.denied or f"the current time in {name}()"
            raise ValueError
        marks = ",".join("?" * len(arguments))
        return helper.execute(f"SELECT {name}({marks})", arguments).fetchone()[0]

    for name in CLOCK_FUNCTIONS:
        connection.create_function(name, -1, partial(call, name), deterministic=True)
