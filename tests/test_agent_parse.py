"""The one parser of completions: think blocks, fences, prose, semicolons, and a name for every failure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight.agents.parse import EMPTY, NO_SQL, ONLY_THINKING, parse

Q = "SELECT count(*) FROM singer"


@pytest.mark.parametrize(
    "text",
    [
        Q,
        f"  {Q} ;\n",
        f"{Q};;",
        f"<think>\n\n</think>\n\n{Q}",
        f"<think>\n\n</think>\n\n```sql\n{Q}\n```",
        f"<think>maybe ```sql\nSELECT 1\n``` or not</think>\n```sql\n{Q};\n```",
        f"so SELECT 1 would do</think>{Q}",
        f"<THINK>x</THINK>```SQL\n{Q}\n```",
        f"```sql {Q}```",
        f"```{Q}```",
        f"```\n{Q}\n```",
        f"```sqlite\n{Q}\n```",
        f"```sql\n{Q}",
        f"~~~sql\n{Q}\n~~~",
        f"```sql\r\n{Q}\r\n```",
        f"```SQL: {Q}```",
        f"First try:\n```sql\nSELECT 1\n```\nBetter:\n```sql\n{Q}\n```\nThis counts the singers.",
        f"```sql\n{Q}\n```\nIt returns:\n```\n6\n```",
        f"```sql\n{Q}\n```\n```python\nprint('SELECT 1')\n```",
        f"Here you are: {Q}",
        f"Here you are:\n\n{Q}\n\nIt counts every singer.",
        f"{Q};\n\nThis query counts every singer.",
        f"Use `{Q}` for that.",
    ],
)
def test_the_query_is_found(text: str) -> None:
    assert parse(text).sql == Q
    assert parse(text).failure == ""


@pytest.mark.parametrize(
    "query",
    [
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "SELECT ';' FROM t",
        "SELECT a\n\nFROM t\n\nWHERE b = 1",
        "-- all of them\nSELECT * FROM t",
        "(SELECT 1)",
        "SELECT '```' FROM t",
        "SELECT * FROM t WHERE note = '<b>with</b>'",
    ],
)
def test_a_bare_query_stays_as_it_is(query: str) -> None:
    assert parse(query).sql == query


def test_a_second_statement_is_never_hidden_from_the_executor() -> None:
    for text in (f"{Q}; DROP TABLE singer", f"{Q};\n\nDROP TABLE singer", f"```sql\n{Q};\nDELETE FROM singer\n```"):
        assert "singer;" in parse(text).sql
        assert parse(text).sql.split()[-1] == "singer"


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("", EMPTY),
        (" \n", EMPTY),
        ("<think>I wonder whether SELECT 1", ONLY_THINKING),
        ("<think>hm</think>\n\n", ONLY_THINKING),
        ("I cannot answer that.", NO_SQL),
        ("Select the red one, please? No.", None),
        ("```\n6\n```", NO_SQL),
        ("```sql\n```", NO_SQL),
    ],
)
def test_a_failure_has_a_name(text: str, failure: str | None) -> None:
    parsed = parse(text)
    if failure is not None:
        assert (parsed.sql, parsed.failure) == ("", failure)
    assert bool(parsed.sql) != bool(parsed.failure)


@given(st.text(alphabet=st.sampled_from("`~\n ;<>/thinksqlSELECT1()'\"-*ü\ud800"), max_size=60))
def test_any_text_gives_a_query_or_a_failure(text: str) -> None:
    parsed = parse(text)
    assert bool(parsed.sql) != bool(parsed.failure)


def test_long_hostile_text_is_parsed_in_no_time() -> None:
    for piece in ("`", "```", "<think>", "(", "\n\n", "-- \n", "with a as (", "select ", "/*", "; "):
        parse(piece * (20_000 // len(piece)))  # a quadratic pattern would take minutes here
