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
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import repeat, starmap
from pathlib import Path
from time import monotonic
from typing import Any

HEAP_BYTES = 512 << 20  # all of SQLite's memory in this process; it can only be lowered once set
CACHE_KIB = 8192  # pages kept for each connection
PROGRESS_STEPS = 1000  # VM instructions between two looks at the clock, about 20 us

# One C call of these takes (length of one argument) x (length of another) steps, and no handler interrupts a C call: a
# statement that names one gets values of at most so many bytes (each call then takes well under a second).
# It also gets more looks at the clock.
QUADRATIC_STEPS = 50
QUADRATIC = {"trim": 20_000, "instr": 100_000, "replace": 100_000, "glob": 200_000, "like": 200_000}
# Bodies of common table expressions that SQLite may copy while it prepares a statement: 10,000 take 0.1 s.
EXPANSIONS = 10_000

# What "now" is under the strict policy: a verdict must be the same tomorrow. The published evaluator's year.
NOW = "2020-01-01 00:00:00"
DATE_FUNCTIONS = ("date", "time", "datetime", "julianday", "unixepoch", "strftime")
CURRENT = {"current_date": NOW[:10], "current_time": NOW[11:], "current_timestamp": NOW}
_LISTED = """
    count sum total avg min max group_concat
    abs round sign ceil ceiling floor trunc mod pow power sqrt exp ln log log2 log10 pi degrees radians
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh
    length lower upper substr substring instr replace trim ltrim rtrim like glob unicode char hex quote soundex
    coalesce ifnull nullif iif typeof likely unlikely likelihood
    row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value nth_value
    json json_array json_array_length json_extract json_object json_quote json_type json_valid -> ->>
    json_group_array json_group_object
"""
FUNCTIONS = frozenset(_LISTED.split()).union(DATE_FUNCTIONS, CURRENT)
DANGEROUS = frozenset(("load_extension", "fts3_tokenizer", "sqlite_log"))
_PROCESS_WIDE = ("hard_heap_limit", "soft_heap_limit", "temp_store_directory", "data_store_directory")
_SECRET_TABLES = ("sqlite_", "pragma_", "dbstat")

_WRITES = "CREATE DROP ALTER ATTACH DETACH ANALYZE REINDEX PRAGMA SAVEPOINT TRANSACTION DELETE INSERT UPDATE"
_WORDS = {
    value: name.removeprefix("SQLITE_").replace("_", " ")
    for name, value in vars(sqlite3).items()
    if name.startswith(tuple(f"SQLITE_{word}" for word in _WRITES.split()))
}


@dataclass(frozen=True, eq=False)
class Policy:
    """What a statement may do. Compared by identity. ``functions`` is the allow-list, None all but dangerous ones."""

    functions: frozenset[str] | None = FUNCTIONS
    schema_tables: bool = False  # sqlite_master and its like may be read
    decode_errors: str = "surrogateescape"  # what becomes of text that is not UTF-8
    clock: bool = False  # the real time, not NOW
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
    """What the authorizer saw during the current statement."""

    deadline: float = 0.0  # time.monotonic() seconds
    late: bool = False
    denied: str = ""  # the first thing that was refused, in words


@dataclass(slots=True)
class Guarded:
    """A guarded connection, its observations and its policy: used by one thread at a time."""

    connection: sqlite3.Connection
    state: State
    policy: Policy

    def begin(self, timeout_s: float, steps: int = PROGRESS_STEPS) -> float:
        """Forget the last statement and start the clock; returns time.monotonic()."""
        now = monotonic()
        state = self.state
        state.late, state.denied, state.deadline = False, "", now + timeout_s
        # "deadline < monotonic()" without a frame of Python: this runs every few microseconds
        late = map(state.deadline.__lt__, starmap(monotonic, repeat(())))
        self.connection.set_progress_handler(late.__next__, steps)
        return now


def connect(database: Path, policy: Policy = STRICT) -> Guarded:
    """A guarded connection to an existing file. Raises sqlite3.Error where the file cannot be opened or is no database."""
    connection = sqlite3.connect(
        read_only_uri(database), uri=True, isolation_level=None, cached_statements=0, check_same_thread=False
    )
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    connection.execute("PRAGMA query_only=1")
    connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
    # An open read transaction keeps the cached pages valid: the file is not asked for changes before each statement.
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return _guard(connection, policy, _read_only)


def connect_copy(database: Path, policy: Policy) -> Guarded:
    """A guarded connection to a copy in memory, which may be written to; no other file can be reached from it."""
    connection = sqlite3.connect(":memory:", cached_statements=0, check_same_thread=False)
    with closing(sqlite3.connect(read_only_uri(database), uri=True)) as source:
        source.backup(connection)
    return _guard(connection, policy, _anything_but_files)


def read_only_uri(database: Path) -> str:
    path = str(database.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return f"file:{path}?mode=ro&immutable=1"


def _guard(
    connection: sqlite3.Connection, policy: Policy, authorizer: Callable[[State, Policy], Callable[..., int]]
) -> Guarded:
    for pragma in ("temp_store=2", f"hard_heap_limit={HEAP_BYTES}"):
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
        _replace_functions(connection, DATE_FUNCTIONS, _at_fixed_time)
        for name, value in CURRENT.items():
            connection.create_function(name, 0, partial(str, value), deterministic=True)
    if policy.functions is None:
        _replace_functions(connection, ("printf", "format"), _narrow)
    connection.set_authorizer(authorizer(state, policy))
    return Guarded(connection, state, policy)


def _read_only(state: State, policy: Policy) -> Callable[..., int]:
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
        if action == select:
            return ok
        if action == read:
            if policy.schema_tables or not (first or "").lower().startswith(_SECRET_TABLES):
                return ok
            state.denied = state.denied or f"reading {first}"
        elif action == function:
            if second in functions if functions is not None else second not in DANGEROUS:
                return ok
            state.denied = state.denied or f"function {second}"
        elif action == recursive:
            return ok
        else:
            state.denied = state.denied or _WORDS.get(action, f"action {action}")
        return deny

    return allowed


def _anything_but_files(state: State, policy: Policy) -> Callable[..., int]:
    def allowed(action: int, first: str | None, second: str | None, database: str | None, inside: str | None) -> int:
        if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH):  # VACUUM asks for ATTACH too
            state.denied = "ATTACH"
        elif action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in _PROCESS_WIDE:
            state.denied = f"PRAGMA {first}"
        elif action == sqlite3.SQLITE_FUNCTION and second in DANGEROUS:
            state.denied = f"function {second}"
        else:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    return allowed


def _replace_functions(connection: sqlite3.Connection, names: Sequence[str], change: Callable[..., Sequence[Any]]) -> None:
    """Give functions of SQLite's own other arguments: what ``change`` makes of name and arguments; it may raise to refuse."""
    helper = sqlite3.connect(":memory:", check_same_thread=False)

    def call(name: str, *arguments: Any) -> Any:
        changed = change(name, *arguments)
        return helper.execute(f"SELECT {name}({','.join('?' * len(changed))})", changed).fetchone()[0]

    for name in names:
        connection.create_function(name, -1, partial(call, name), deterministic=True)


def _at_fixed_time(name: str, *arguments: Any) -> Sequence[Any]:
    """The arguments of a date function with NOW for "now" and where no time is given."""
    at = 1 if name == "strftime" else 0
    if len(arguments) == at:
        return (*arguments, NOW)
    if len(arguments) > at and isinstance(arguments[at], str | bytes) and arguments[at].lower() in ("now", b"now"):
        return (*arguments[:at], NOW, *arguments[at + 1 :])
    return arguments


def _narrow(name: str, *arguments: Any) -> Sequence[Any]:
    """The arguments of a format that pads to no more than 999: printf('%.*c', 900000000, 'x') is one C call without end."""
    if arguments and re.search(r"[*]|\d{4}", str(arguments[0])):
        raise ValueError(name)
    return arguments
