"""Run one untrusted SELECT on a SQLite file: rows, error, timeout, too_large or refused, and nothing else can happen.

    execute(Path("concert.sqlite"), "SELECT count(*) FROM singer") -> Result(kind="rows", columns=("count(*)",), rows=[(6,)])

Connections are kept (per process, database and policy), so that a warm call costs about 0.1 ms. Safe to call from several
threads. What no handler can interrupt (a single C call) is bounded by limits here, and ended for sure by the process of
``slurmlight.sql.worker``.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from sys import getsizeof
from time import monotonic
from typing import Any, Literal

from slurmlight.errors import UserError
from slurmlight.sql.guard import EXPANSIONS, PROGRESS_STEPS, QUADRATIC, QUADRATIC_STEPS, STRICT, Guarded, Policy, connect
from slurmlight.sql.tokens import expansions, first_word

Kind = Literal["rows", "error", "timeout", "too_large", "refused"]
Row = tuple[Any, ...]
KEPT_CONNECTIONS = 256

_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
_IOERR_NOMEM = 3082
_QUERY_WORDS = ("SELECT", "WITH", "VALUES")
_PLAN_COLUMNS = ("addr", "id")


class DatabaseMissing(UserError):
    """There is no database file: a fault of the task, never of the query."""


class DatabaseBroken(UserError):
    """The file is no SQLite database, is damaged, or is being written: a fault of the task, never of the query."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one execution. ``max_bytes`` counts the fetched values as Python objects."""

    timeout_s: float = 5.0
    max_rows: int = 20_000
    max_bytes: int = 64 << 20
    policy: Policy = STRICT


DEFAULT = Limits()


@dataclass(frozen=True, slots=True)
class Result:
    """What came out. ``rows`` and ``columns`` only for kind "rows"; ``error`` is a short stable name of what went wrong.

    Text that is not UTF-8 keeps its bytes as lone surrogates (``surrogateescape``), so different bytes stay different.
    """

    kind: Kind
    columns: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)
    message: str = ""
    error: str = ""
    seconds: float = 0.0


type Identity = tuple[str, int, int, int]


def identity(database: Path) -> Identity:
    """Which file this is now: path, inode, size, modification time. Raises DatabaseMissing."""
    path = str(database)
    try:
        stat = os.stat(path)
    except OSError as error:
        raise DatabaseMissing(f"no database at {database} ({error.strerror})", "check the path or import the data") from None
    return path, stat.st_ino, stat.st_size, stat.st_mtime_ns


def execute(database: Path, sql: str, limits: Limits = DEFAULT) -> Result:
    """Run ``sql``. Raises DatabaseMissing or DatabaseBroken where the task, not the query, is at fault."""
    return execute_on(identity(database), sql, limits, limits.max_rows)


def execute_on(file: Identity, sql: str, limits: Limits, max_rows: int) -> Result:
    """``execute`` for a caller that knows the file's identity, with a row cap of its own."""
    key = (file, limits.policy)
    guarded = _borrow(key)
    try:
        result = run_guarded(guarded, sql, limits, max_rows)
    except BaseException:
        guarded.connection.close()
        raise
    if result.error == "memory":
        guarded.connection.close()
    else:
        _give_back(key, guarded)
    return result


def run_guarded(guarded: Guarded, sql: str, limits: Limits, max_rows: int) -> Result:
    """Run ``sql`` on a connection that the caller keeps. Raises DatabaseBroken."""
    lowered = sql.lower()
    if "with" in lowered and expansions(sql) > EXPANSIONS:
        return Result("too_large", message="nested common table expressions multiply", error="too_complex")
    longest = 0
    for name, size in QUADRATIC.items():
        if name in lowered:
            longest = min(longest or size, size)
    start = guarded.begin(limits.timeout_s, QUADRATIC_STEPS if longest else PROGRESS_STEPS)
    if longest:
        guarded.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
    try:
        kind, columns, rows, error, message = _outcome(guarded, sql, limits, max_rows)
    finally:
        if longest:
            guarded.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, guarded.policy.value_bytes)
    return Result(kind, columns, rows, message, error, monotonic() - start)


type _Outcome = tuple[Kind, tuple[str, ...], list[Row], str, str]


def _outcome(guarded: Guarded, sql: str, limits: Limits, max_rows: int) -> _Outcome:
    try:
        return _fetch(guarded.connection, sql, limits.max_bytes, max_rows)
    except sqlite3.OperationalError as failure:
        if not str(failure).startswith("Could not decode to UTF-8"):
            return _failed(failure, guarded, sql)
    except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as failure:
        return _failed(failure, guarded, sql)
    # Decoding in C is fast but strict; the few results with other bytes are worth a second run.
    guarded.connection.text_factory = partial(str, encoding="utf-8", errors=guarded.policy.decode_errors)
    try:
        return _fetch(guarded.connection, sql, limits.max_bytes, max_rows)
    except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as failure:
        return _failed(failure, guarded, sql)
    finally:
        guarded.connection.text_factory = str


def _fetch(connection: sqlite3.Connection, sql: str, max_bytes: int, max_rows: int) -> _Outcome:
    cursor = connection.execute(sql)
    try:
        if cursor.description is None:
            return _not_a_query(first_word(sql))
        columns = tuple([column[0] for column in cursor.description])
        if columns[0] in _PLAN_COLUMNS and first_word(sql) == "EXPLAIN":  # the authorizer is not told of EXPLAIN
            return _not_a_query("EXPLAIN")
        rows: list[Row] = []
        left = max_bytes
        # One row at a time: a row can hold as much as columns x value limit, a batch of them would not fit in memory.
        for row in cursor:
            left -= sum(map(getsizeof, row))
            if left < 0:
                return "too_large", (), [], "bytes", f"the result is larger than {max_bytes} bytes"
            rows.append(row)
            if len(rows) > max_rows:
                return "too_large", (), [], "rows", f"the result has more than {max_rows} rows"
        return "rows", columns, rows, "", ""
    finally:
        cursor.close()


def _not_a_query(word: str) -> _Outcome:
    return "refused", (), [], "not_a_query", f"not a query: {word[:20] if word else 'no SQL in it'}"


def _failed(failure: Exception, guarded: Guarded, sql: str) -> _Outcome:
    """The outcome that an exception of sqlite3 stands for. Raises DatabaseBroken where it is the file's."""
    message, state = str(failure), guarded.state
    code = getattr(failure, "sqlite_errorcode", 0)
    if isinstance(failure, UnicodeEncodeError):
        return "error", (), [], "not_utf8", "the SQL text is not valid UTF-8"
    if isinstance(failure, MemoryError) or code == _IOERR_NOMEM:
        return "too_large", (), [], "memory", "the query needs more memory than allowed"
    if state.denied:
        word = first_word(sql)
        if word not in _QUERY_WORDS:
            return _not_a_query(word)
        return "refused", (), [], "not_allowed", f"not allowed: {state.denied}"
    if state.late or code == sqlite3.SQLITE_INTERRUPT:
        return "timeout", (), [], "timeout", "no result within the time limit"
    if "one statement at a time" in message:
        return "refused", (), [], "statements", "more than one statement"
    if code & 0xFF == sqlite3.SQLITE_TOOBIG or isinstance(failure, sqlite3.DataError):
        return "too_large", (), [], "value", message
    if code & 0xFF in _BROKEN:
        raise DatabaseBroken(f"the database cannot be read: {message}", "restore the file from where it came") from None
    name = _error_name(message)
    if name == "other" and (word := first_word(sql)) not in _QUERY_WORDS:  # VACUUM and the like fail in a read transaction
        return _not_a_query(word)
    return "error", (), [], name, message


_ERROR_NAMES = (
    ("syntax error", "syntax"),
    ("unrecognized token", "syntax"),
    ("incomplete input", "syntax"),
    ("no such table", "no_such_table"),
    ("no such column", "no_such_column"),
    ("no such function", "no_such_function"),
    ("ambiguous column", "ambiguous_column"),
    ("misuse of", "misuse_of_aggregate"),
    ("do not have the same number of result columns", "compound_columns"),
    ("stack overflow", "too_complex"),
    ("too many", "too_complex"),
    ("too large", "too_complex"),
    ("null character", "null_character"),
)


def _error_name(message: str) -> str:
    return next((name for part, name in _ERROR_NAMES if part in message), "other")


# Kept connections: a stack for each file and policy. A replaced file has another identity, so another stack.

type _Key = tuple[Identity, Policy]

_kept: dict[_Key, list[Guarded]] = {}
_kept_count = 0
_lock = threading.Lock()


def _borrow(key: _Key) -> Guarded:
    global _kept_count
    with _lock:
        stack = _kept.get(key)
        if stack:
            _kept_count -= 1
            return stack.pop()
    return _open(Path(key[0][0]), key[0][2], key[1])


def _open(database: Path, size: int, policy: Policy) -> Guarded:
    if not database.is_file():
        raise DatabaseMissing(f"{database} is not a file", "give the path of the .sqlite file")
    if size == 0:
        raise DatabaseBroken(f"{database} is empty (0 bytes)", "restore the file from where it came")
    for suffix in ("-wal", "-journal"):
        log = database.with_name(database.name + suffix)
        if log.exists() and log.stat().st_size:
            raise DatabaseBroken(f"{database} is being written ({log.name} exists)", "end the writer, or work on a copy")
    try:
        return connect(database, policy)
    except sqlite3.Error as error:
        raise DatabaseBroken(f"{database} cannot be read: {error}", "restore the file from where it came") from None


def _give_back(key: _Key, guarded: Guarded) -> None:
    global _kept_count
    with _lock:
        _kept.setdefault(key, []).append(guarded)
        _kept_count += 1
        while _kept_count > KEPT_CONNECTIONS:
            for old in _kept.pop(next(iter(_kept))):
                old.connection.close()
                _kept_count -= 1


def close_all() -> None:
    """Close the kept connections of this process."""
    global _kept_count
    with _lock:
        for stack in _kept.values():
            for guarded in stack:
                guarded.connection.close()
        _kept.clear()
        _kept_count = 0


def _forget() -> None:
    """In a forked child: the parent's connections are not ours to use."""
    global _lock, _kept_count
    _lock, _kept_count = threading.Lock(), 0
    _kept.clear()


os.register_at_fork(after_in_child=_forget)
