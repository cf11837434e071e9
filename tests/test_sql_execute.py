"""The executor: what it answers, what it refuses, and that nothing a query does outlives the query."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurmlight.sql.execute import DatabaseBroken, DatabaseMissing, Limits, close_all, execute
from tests.sqlbed import build, sha256

LONG = f"SELECT length({'hex(' * 15}name{')' * 15}) FROM emp"
ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM r)"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    folder = tmp_path / "db"
    folder.mkdir()
    return build(folder / "emp.sqlite")


def test_rows_come_with_their_columns(database: Path) -> None:
    result = execute(database, "SELECT name, age AS years FROM emp WHERE dept = 'B' ORDER BY id")
    assert (result.kind, result.columns, result.rows) == ("rows", ("name", "years"), [("Cid", 40), ("Dee", 50)])
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("sql", "kind", "error"),
    [
        ("SELECT nmae FROM emp", "error", "no_such_column"),
        ("SELECT a FROM missing", "error", "no_such_table"),
        ("SELEC name FROM emp", "error", "syntax"),
        ("SELECT nosuch(name) FROM emp", "error", "no_such_function"),
        ("SELECT id FROM emp, person", "error", "ambiguous_column"),
        ("SELECT ?", "error", "other"),
        ("SELECT '\0'", "error", "null_character"),
        ("SELECT '\udcff'", "error", "not_utf8"),
        ("```sql\nSELECT 1\n```", "error", "syntax"),
        ("SELECT " + "(" * 1000 + "1" + ")" * 1000, "error", "too_complex"),
        ("SELECT 1; SELECT 2", "refused", "statements"),
        ("", "refused", "not_a_query"),
        (" \n-- nothing\n", "refused", "not_a_query"),
        ("EXPLAIN SELECT name FROM emp", "refused", "not_a_query"),
        ("/* x */ explain query plan SELECT name FROM emp", "refused", "not_a_query"),
        ("DROP TABLE emp", "refused", "not_a_query"),
        ("DELETE FROM emp", "refused", "not_a_query"),
        ("INSERT INTO emp(name) VALUES ('x') RETURNING name", "refused", "not_a_query"),
        ("CREATE TEMP TABLE t(a)", "refused", "not_a_query"),
        ("PRAGMA query_only=OFF", "refused", "not_a_query"),
        ("BEGIN EXCLUSIVE", "refused", "not_a_query"),
        ("COMMIT", "refused", "not_a_query"),
        ("REINDEX", "refused", "not_a_query"),
        ("WITH x AS (SELECT 1) DELETE FROM emp", "refused", "not_allowed"),
        ("SELECT sql FROM sqlite_master", "refused", "not_allowed"),
        ("SELECT * FROM pragma_table_info('emp')", "refused", "not_allowed"),
        ("SELECT random()", "refused", "not_allowed"),
        ("SELECT printf('%d', 1)", "refused", "not_allowed"),
        ("SELECT load_extension('x')", "refused", "not_allowed"),
        (f"{ENDLESS} SELECT n FROM r", "too_large", "rows"),
        ("SELECT '" + "x" * 1_000_000 + "'", "too_large", "value"),
        (f"{ENDLESS[:-1]} LIMIT 400000) SELECT group_concat(n) FROM r", "too_large", "value"),
    ],
)
def test_every_failure_has_a_kind_and_a_name(database: Path, sql: str, kind: str, error: str) -> None:
    result = execute(database, sql)
    assert (result.kind, result.error, result.rows) == (kind, error, [])
    assert result.message


def test_what_honest_queries_use_is_allowed(database: Path) -> None:
    sql = """SELECT upper(name), substr(name, 1, 1) || '!', round(avg(age), 1), strftime('%Y', '2020-05-01'), date('2020-01-31', '+1 day'),
             coalesce(max(salary), 0), count(DISTINCT dept), group_concat(name), CAST(age AS TEXT), name LIKE 'a%',
             row_number() OVER (ORDER BY name), iif(age > 3, 1, 0), abs(-1), instr(name, 'n'), replace(name, 'n', 'm')
             FROM emp GROUP BY name HAVING count(*) > 0 ORDER BY name"""
    result = execute(database, sql)
    assert (result.kind, len(result.rows)) == ("rows", 4)
    assert result.rows[0][3:5] == ("2020", "2020-02-01")


def test_the_time_stands_still(database: Path) -> None:
    sql = """SELECT date('now'), date(), time('NOW'), datetime('no' || 'w', '+1 day'), strftime('%Y'), strftime('%Y', x'6e6f77'),
             CURRENT_DATE, current_time, CURRENT_TIMESTAMP, date(NULL), date('2001-02-03'), unixepoch('now')"""
    (row,) = execute(database, sql).rows
    assert row[:6] == ("2020-01-01", "2020-01-01", "00:00:00", "2020-01-02 00:00:00", "2020", "2020")
    assert row[6:] == ("2020-01-01", "00:00:00", "2020-01-01 00:00:00", None, "2001-02-03", 1577836800)


def test_text_that_is_not_utf8_keeps_its_bytes(database: Path) -> None:
    rows = execute(database, "SELECT last FROM person ORDER BY id").rows
    assert rows == [("Muoz",), ("Mu\udcf1oz",), ("caf\u00e9",), ("NULL",), (None,)]


@pytest.mark.parametrize(
    "sql",
    [
        f"{ENDLESS} SELECT count(*) FROM r",
        "SELECT count(*) FROM " + ", ".join(f"emp e{i}" for i in range(14)),
        f"{ENDLESS[:-1]} LIMIT 50000000) SELECT n FROM r ORDER BY -n",
        f"{ENDLESS} SELECT count(*) FROM r WHERE replace(hex(n), '3', '') LIKE '%x%'",
        f"{ENDLESS} SELECT 1 FROM r WHERE n < 0",
        "WITH " + ", ".join(f"RECURSIVE r{i}(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM r{i})"[10 * (i > 0) :] for i in range(10))
        + " SELECT count(*) FROM " + ", ".join(f"r{i}" for i in range(10)),
    ],
)  # fmt: skip
def test_a_runaway_ends_at_its_deadline(database: Path, sql: str) -> None:
    start = time.thread_time()
    result = execute(database, sql, Limits(timeout_s=0.2))
    assert result.kind == "timeout"
    assert time.thread_time() - start < 0.2 * 1.2 + 0.1  # CPU seconds: what other processes take does not count


def test_nested_ctes_that_multiply_while_preparing_are_refused_at_once(database: Path) -> None:
    steps = "".join(f", a{i}(y) AS (SELECT 1 FROM a{i - 1} p, a{i - 1} q)" for i in range(1, 40))
    result = execute(database, f"WITH a0(y) AS (SELECT 1){steps} SELECT * FROM a39")
    assert (result.kind, result.error) == ("too_large", "too_complex")


def test_rows_and_bytes_are_capped(database: Path) -> None:
    assert execute(database, "SELECT 1 FROM emp", Limits(max_rows=5)).kind == "rows"
    assert execute(database, "SELECT 1 FROM emp", Limits(max_rows=4)).error == "rows"
    wide = f"{ENDLESS} SELECT hex(hex(hex(hex(hex(hex(hex(hex(hex(hex(n)))))))))) || n FROM r"
    assert execute(database, wide, Limits(max_bytes=1_000_000)).error == "bytes"


def test_nothing_is_written_anywhere(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    before = sha256(database)
    for sql in (
        "VACUUM INTO 'copy.sqlite'",
        "ATTACH 'new.sqlite' AS z",
        "ATTACH 'file:new.sqlite?mode=rwc' AS z",
        "PRAGMA journal_mode=WAL",
        "PRAGMA temp_store_directory='/tmp'",
        "CREATE TABLE evil(a)",
        "CREATE VIRTUAL TABLE temp.v USING fts5(a)",
        "ALTER TABLE emp ADD COLUMN z",
        "UPDATE emp SET age = 0",
        "DROP TABLE emp",
        "VACUUM",
    ):
        assert execute(database, sql).kind == "refused"
    assert sha256(database) == before
    assert os.listdir(out) == []
    assert os.listdir(database.parent) == [database.name]
    assert execute(database, "SELECT count(*) FROM emp").rows == [(5,)]


def test_a_missing_or_broken_database_is_no_outcome_of_the_query(tmp_path: Path, database: Path) -> None:
    with pytest.raises(DatabaseMissing):
        execute(tmp_path / "none.sqlite", "SELECT 1")
    with pytest.raises(DatabaseMissing):
        execute(tmp_path, "SELECT 1")
    (tmp_path / "text.sqlite").write_text("no database at all " * 100)
    with pytest.raises(DatabaseBroken):
        execute(tmp_path / "text.sqlite", "SELECT 1")
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(DatabaseBroken):
        execute(tmp_path / "empty.sqlite", "SELECT 1")
    torn = shutil.copy(database, tmp_path / "torn.sqlite")
    with open(torn, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8192)
    with pytest.raises(DatabaseBroken):
        execute(torn, "SELECT * FROM emp")
    Path(f"{database}-wal").write_bytes(b"frames")
    close_all()
    with pytest.raises(DatabaseBroken, match="being written"):
        execute(database, "SELECT 1")


def test_a_locked_database_is_read_without_waiting(database: Path) -> None:
    writer = sqlite3.connect(database)
    writer.execute("BEGIN EXCLUSIVE")
    assert execute(database, "SELECT count(*) FROM emp").rows == [(5,)]
    writer.close()


def test_a_replaced_database_is_seen(database: Path) -> None:
    assert execute(database, "SELECT count(*) FROM emp").rows == [(5,)]
    other = build(database.with_name("other.sqlite"))
    changed = sqlite3.connect(other)
    changed.execute("DELETE FROM emp WHERE id > 1")
    changed.commit()
    changed.close()
    os.replace(other, database)
    assert execute(database, "SELECT count(*) FROM emp").rows == [(1,)]


def test_odd_paths_are_opened_as_they_are(database: Path) -> None:
    odd = shutil.copy(database, database.with_name("a?mode=rwc#b%20c.sqlite"))
    assert execute(odd, "SELECT count(*) FROM emp").rows == [(5,)]


def test_threads_share_the_executor(database: Path) -> None:
    queries = ["SELECT count(*) FROM emp", "SELECT nope", "SELECT name FROM emp WHERE id = 1"] * 30
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda sql: execute(database, sql), queries))
    assert [result.rows for result in results[:3]] == [[(5,)], [], [("Ann",)]]
    assert [result.kind for result in results] == ["rows", "error", "rows"] * 30


def test_a_failure_leaves_the_next_query_unharmed(database: Path) -> None:
    for sql in ("SELECT printf('x')", f"{ENDLESS} SELECT count(*) FROM r", "SELECT trim(name) FROM missing"):
        execute(database, sql, Limits(timeout_s=0.05))
        result = execute(database, LONG)
        assert (result.kind, result.rows[0]) == ("rows", (3 << 15,))
