"""Schema text: every name within the budget or a named error, whatever bytes the database holds; and the token estimate."""

from __future__ import annotations

import os
import sqlite3
import tarfile
import time
from pathlib import Path

import pytest

from slurmlight.sql.budget import estimate
from slurmlight.sql.schema import SchemaError, compact_text, read_schema, schema_text
from tests.shared import shared


def database(path: Path, *statements: str) -> Path:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return database(
        tmp_path / "shop.sqlite",
        "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city VARCHAR(20))",
        'CREATE TABLE "order" (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers, "total price" REAL)',
        "INSERT INTO customers VALUES (1, 'Ann', 'Rome'), (2, 'O''Hara', 'Paris'), (3, 'Zoe', 'Rome')",
        'INSERT INTO "order" VALUES (1, 2, 9.5)',
    )


def test_the_full_text(shop: Path) -> None:
    assert schema_text(read_schema(shop), 1000).splitlines() == [
        "customers(id INTEGER [1, 2, 3], name TEXT ['Ann', 'O''Hara', 'Zoe'], city VARCHAR(20) ['Rome', 'Paris'])",
        '"order"(id INTEGER [1], customer_id INTEGER [2], "total price" REAL [9.5])',
        'Foreign keys: "order".customer_id = customers.id',
        'Primary keys: customers.id, "order".id',
    ]
    assert compact_text(read_schema(shop)) == 'customers(id, name, city)\n"order"(id, customer_id, "total price")'


def test_every_budget_keeps_every_name_or_says_why_not(shop: Path) -> None:
    schema = read_schema(shop)
    least = estimate(compact_text(schema))
    sizes = []
    for budget in range(least, 150):
        text = schema_text(schema, budget, "Which city?")
        assert estimate(text) <= budget
        for table in schema:
            assert table.name in text and all(column.name in text for column in table.columns)
        sizes.append(estimate(text))
    assert sizes[0] < sizes[-1]
    with pytest.raises(SchemaError, match=rf"names of 2 tables alone take about {least} tokens of {least - 1}"):
        schema_text(schema, least - 1)


def test_what_the_question_names_is_sampled_first(shop: Path) -> None:
    schema = read_schema(shop)
    for question, shown in (("In which cities?", "['Rome'"), ("Where does O'Hara live?", "['Ann'")):
        texts = [schema_text(schema, budget, question) for budget in range(80, 200)]
        first = next(text for text in texts if "[" in text)  # room for one column's samples
        assert shown in first and first.count("[") == 1


def test_any_bytes_and_odd_tables_are_tolerated(tmp_path: Path) -> None:
    path = database(
        tmp_path / "odd?#%.sqlite",
        'CREATE TABLE "a ""quoted"" name" ("select" TEXT, "größe" TEXT, "" TEXT)',
        "CREATE TABLE t (latin TEXT, blob BLOB, empty TEXT, big TEXT, void)",
        "INSERT INTO t VALUES (CAST(x'4df16f7a' AS TEXT), x'00ff', '', 'line\n\tbreak ' || hex(zeroblob(100000)), NULL)",
        "CREATE VIEW v AS SELECT latin, nil FROM gone",
        "CREATE VIEW w AS SELECT latin FROM t",
    )
    text = schema_text(read_schema(path), 1000)
    assert '"a ""quoted"" name"("select" TEXT, "größe" TEXT, "" TEXT)' in text
    assert "latin TEXT ['M\ufffdoz']" in text
    assert "blob BLOB, empty TEXT, big TEXT ['line break 00" in text
    assert len(text) < 500
    text.encode()  # no lone surrogates: it goes into a JSON request


def test_a_huge_table_costs_no_time(tmp_path: Path) -> None:
    path = database(
        tmp_path / "huge.sqlite",
        "CREATE TABLE t (a TEXT, b INTEGER)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) INSERT INTO t SELECT 'same', 1 FROM n",
    )
    start = time.process_time()
    assert "a TEXT ['same']" in schema_text(read_schema(path), 100)
    assert time.process_time() - start < 2  # a full scan for the absent second value would take longer per column


def test_the_cache_follows_the_file(shop: Path) -> None:
    assert read_schema(shop) is read_schema(shop)
    database(shop, "CREATE TABLE more (x)")
    os.utime(shop, ns=(1, 1))
    assert "more(x)" in compact_text(read_schema(shop))


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read"), (b"this is no database at all " * 99, "not a database"), (b"", "has no table")],
)
def test_no_schema_is_a_named_error(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "x.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SchemaError, match=says):
        read_schema(path)


def test_every_spider_database_shows_all_its_names(tmp_path: Path) -> None:
    with tarfile.open(shared("data", "spider.tar.gz")) as archive:
        members = [member for member in archive if member.name.endswith(".sqlite")]
        archive.extractall(tmp_path, members, filter="data")
    paths = sorted(tmp_path.rglob("*.sqlite"))
    assert len(paths) == 163
    for path in paths:
        schema = read_schema(path)
        text = schema_text(schema, 2000)
        assert estimate(text) <= 2000
        for table in schema:
            assert table.name in text and all(column.name in text for column in table.columns), path.name
