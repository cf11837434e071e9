"""Reading SQL without parsing it: first words, top-level ORDER BY, texts of the same tokens, CTEs that multiply."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight.sql.hardness import hardness
from slurmlight.sql.order import tie_groups, top_level_order, with_keys
from slurmlight.sql.tokens import canonical, expansions, first_word, tokenize


@given(st.text(max_size=80))
def test_any_text_is_cut_into_tokens_that_lie_in_it(text: str) -> None:
    tokens = list(tokenize(text))
    assert all(text[token.start : token.end] == token.text for token in tokens)
    assert all(a.end <= b.start for a, b in pairwise(tokens))


@pytest.mark.parametrize(
    ("sql", "word"),
    [("", ""), ("  -- x\n/* y */ select 1", "SELECT"), ("\ufeffWITH a", "WITH"), ("'select'", "'select'"), ("/* open", "")],
)
def test_first_word(sql: str, word: str) -> None:
    assert first_word(sql) == word


@pytest.mark.parametrize(
    ("sql", "keys"),
    [
        (
            "SELECT name FROM emp ORDER  BY age DESC, lower(name) COLLATE nocase ASC LIMIT 3;",
            ("age", "lower(name) COLLATE nocase"),
        ),
        ("select a from t order\n/* x */ by (select max(b), 1 from u) nulls last", ("(select max(b), 1 from u)",)),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", ("1",)),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", None),
        ("SELECT 'order by a' FROM t", None),
        ('SELECT "order by" FROM t -- order by a', None),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", None),
    ],
)
def test_only_a_top_level_order_by_orders(sql: str, keys: tuple[str, ...] | None) -> None:
    order = top_level_order(sql)
    assert (order and order.keys) == keys


@pytest.mark.parametrize(
    ("sql", "columns", "expected"),
    [
        ("SELECT a, b FROM t ORDER BY b, 1", ("a", "b"), ("SELECT a, b FROM t ORDER BY b, 1", [1, 0])),
        ("SELECT a FROM t ORDER BY (1) COLLATE NOCASE", ("a",), ("SELECT a FROM t ORDER BY (1) COLLATE NOCASE", [0])),
        ("SELECT a -- x\nFROM t ORDER BY c", ("a",), ("SELECT a -- x\n\n, (c)\nFROM t ORDER BY c", [1])),
        (
            "SELECT a IS DISTINCT FROM 1 FROM t ORDER BY c",
            ("x",),
            ("SELECT a IS DISTINCT FROM 1 \n, (c)\nFROM t ORDER BY c", [1]),
        ),
        ("SELECT DISTINCT a FROM t ORDER BY c", ("a",), None),
        ("SELECT DISTINCT a FROM t ORDER BY a", ("a",), ("SELECT DISTINCT a FROM t ORDER BY a", [0])),
    ],
)
def test_order_keys_are_result_columns_or_added_ones(sql: str, columns: tuple[str, ...], expected: object) -> None:
    order = top_level_order(sql)
    assert order is not None
    assert with_keys(order, columns) == expected


def test_tie_groups() -> None:
    assert tie_groups([("x", 1), ("y", 1), ("z", None), ("w", None), ("v", 2)], [1]) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("SELECT  Name\nFROM emp ;", "select name from EMP", True),
        ("SELECT count(*) FROM t WHERE a IN ( 1 , 2 )", "select count(*) from t where a in (1,2)", True),
        ("SELECT 'A  b'", "select 'A  b'", True),
        ("SELECT 'A  b'", "select 'A b'", False),
        ("SELECT 'A'", "SELECT 'a'", False),
        ('SELECT "A"', 'SELECT "a"', False),
        ("SELECT x'00'", "SELECT x '00'", False),
        ("SELECT 'a''b'", "SELECT 'a' 'b'", False),
        ("SELECT a > = 1", "SELECT a >= 1", False),
        ("SELECT 1;;", "SELECT 1;", False),
        ("SELECT 1 -- x", "SELECT 1 --  x", False),
        ("SELECT\x0b1", "SELECT 1", False),
    ],
)
def test_canonical_texts_are_shared_by_the_same_tokens_only(one: str, other: str, same: bool) -> None:
    assert (canonical(one) == canonical(other)) is same


def test_expansions_multiply_over_nested_uses() -> None:
    assert expansions("WITH a AS (SELECT 1) SELECT a.x FROM a") == 1
    assert expansions('WITH a(x) AS (SELECT 1), "b" AS NOT MATERIALIZED (SELECT 1 FROM a p, [a] q) SELECT * FROM b, b') == 2


@pytest.mark.parametrize(
    ("sql", "level"),
    [
        ("SELECT count(*) FROM singer", "easy"),
        ("SELECT name, country FROM singer ORDER BY age DESC", "medium"),
        ("SELECT avg(age), min(age), max(age) FROM singer WHERE country = 'France'", "medium"),
        ("SELECT name FROM a WHERE id NOT IN (SELECT id FROM b)", "hard"),
        ("SELECT a FROM t UNION SELECT b FROM u", "hard"),
        ("SELECT a FROM t JOIN u ON t.id = u.id WHERE b LIKE '%x%' OR c = 1 GROUP BY a LIMIT 1", "extra"),
    ],
)
def test_hardness(sql: str, level: str) -> None:
    assert hardness(sql) == level
