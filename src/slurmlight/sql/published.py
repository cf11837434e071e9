"""The verdict of the published evaluator of Spider (taoyds/test-suite-sql-eval, eval_exec_match), faults included.

Own code after its observed behaviour: texts are changed before they run (DISTINCT removed, "> =" glued, cut at the first
";"), rows are in order iff the gold holds the words "order by", results of non-queries are empty and equal any empty result.

Where the published one crashes or hangs, this one answers: an empty prediction scores 0, "IS NOT DISTINCT FROM" in a gold
stays (removing its DISTINCT would break the gold), and a query over the limits scores 0. A prediction that writes runs on a
copy in memory, ATTACH and VACUUM do nothing, so the verdict is the published one and the database stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmlight.sql.compare import same_exactly
from slurmlight.sql.execute import Identity, Limits, Result, Row, execute_on, run_guarded
from slurmlight.sql.guard import Policy, connect_copy
from slurmlight.sql.tokens import first_word

# What a harmless statement may use that the strict policy refuses: chance, the clock, printf, sqlite_master.
POLICY = Policy(
    functions=None,
    schema_tables=True,
    decode_errors="ignore",
    clock=True,
    value_bytes=10_000_000,
    sql_bytes=2_000_000,
    expression_depth=1000,
    compound_select=500,
    like_pattern=50_000,
    columns=500,
    vm_steps=250_000,
)
COPY_BYTES = 256 << 20  # a larger database is not copied to find out whether a statement that writes would fail

# Quotes may be escaped by a backslash here, unlike in SQLite: so does the lexer that the published evaluator uses.
_LEXEME = re.compile(
    r"""(?:--|\#[ ])[^\r\n]* | /\*(?s:.*?)\*/ | '(?:''|\\'|[^'])*' | "(?:""|\\"|[^"])*" | `(?:``|[^`])*`
      | (?<![\w\])])\[[^\]\[]+\] | \w[\w$\#]* | (?s:.)""",
    re.VERBOSE,
)
_TRAILING = re.compile(r"(?:[^\S\r\n]|(?:--|# )[^\r\n]*(?:\r\n|\r|\n|\Z))*")  # blanks and comments that stay behind a ";"
_IS = re.compile(r"\bIS(?:\s+NOT)?\s*$", re.IGNORECASE)
_CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


def glued(sql: str) -> str:
    """Comparison operators that were split by a blank, joined; also inside string literals."""
    return sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")


def first_statement(sql: str, keep_is_distinct: bool) -> str:
    """``sql`` up to its first ";" outside parentheses, without the word DISTINCT; "" where there is nothing but space."""
    kept: list[str] = []
    depth = 0
    for match in _LEXEME.finditer(sql):
        lexeme = match.group()
        if lexeme.lower() == "distinct":
            if keep_is_distinct and _IS.search("".join(kept[-8:])):
                kept.append(lexeme)
            continue
        kept.append(lexeme)
        depth += (lexeme == "(") - (lexeme == ")")
        if depth <= 0 and (lexeme == ";" or lexeme.upper() == "GO"):
            trailing = _TRAILING.match(sql, match.end())
            kept.append(trailing.group() if trailing else "")
            break
    text = "".join(kept)
    return text if text.strip() else ""


def prepared(sql: str, gold: bool, keep_distinct: bool = False) -> str:
    """The text that the published evaluator runs for ``sql``."""
    text = glued(sql)
    return text if keep_distinct else first_statement(text, keep_is_distinct=gold)


def order_matters(gold: str) -> bool:
    return "order by" in gold.lower()


def run(file: Identity, sql: str, limits: Limits, max_rows: int) -> Result:
    """Run a prepared text as the published evaluator would: anything goes, and what is no query returns no rows."""
    sql = _CURRENT_YEAR.sub("2020", sql)
    result = execute_on(file, sql, replace(limits, policy=POLICY), max_rows)
    if result.kind != "refused" or result.error == "statements":
        return result
    word = first_word(sql)
    if word == "EXPLAIN":  # shows a plan, which no gold equals
        return result
    path, size = file[0], file[2]
    if word in ("", ";") or size > COPY_BYTES:
        return Result("rows")
    copy = connect_copy(Path(path), POLICY)
    try:
        result = run_guarded(copy, sql, limits, max_rows)
    finally:
        copy.connection.close()
    no_rows = result.error == "not_a_query" and not copy.state.denied.startswith("PRAGMA")
    return Result("rows") if no_rows else result


def same_result(gold: Sequence[Row], pred: Sequence[Row], ordered: bool) -> bool:
    """The published comparison: rows as a bag or in order, columns in any order, and a first test on values as text."""
    if not gold or not pred:
        return not gold and not pred
    if len(gold) != len(pred) or len(gold[0]) != len(pred[0]):
        return False
    if gold != pred and not same_exactly(gold, pred, range(len(gold)) if ordered else None):
        return False
    as_text = [[tuple(sorted(row, key=_text_and_type)) for row in rows] for rows in (gold, pred)]
    return as_text[0] == as_text[1] if ordered else set(as_text[0]) == set(as_text[1])


def _text_and_type(value: Any) -> str:
    return str(value) + str(type(value))
