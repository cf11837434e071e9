"""How hard Spider calls a question: easy, medium, hard or extra, from the parts of its gold query.

Spider's rules (Yu et al. 2018, eval_hardness of the published evaluation script) count three things in the outermost query,
the first one of a compound:

* components 1: WHERE, GROUP BY, ORDER BY, LIMIT, every joined table, every OR and LIKE in a condition;
* components 2: subqueries that a condition compares with, and a set operation (one, however many follow);
* others: more than one aggregate, more than one result column, more than one WHERE condition, more than one GROUP BY column.

This is an own reading of tokens, not the published parser. It can differ where that one fails or is blind: conditions in
parentheses (counted here one by one), comma joins, aggregates inside arithmetic (the published parser refuses the last three),
and CTEs (no published rule; the query after WITH counts here).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from slurmlight.sql.tokens import Token, tokenize

Hardness = Literal["easy", "medium", "hard", "extra"]
LEVELS: tuple[Hardness, ...] = ("easy", "medium", "hard", "extra")

_AGGREGATES = ("MAX", "MIN", "COUNT", "SUM", "AVG")
_CLAUSES = ("SELECT", "FROM", "WHERE", "GROUP", "HAVING", "ORDER", "LIMIT")
_COMPOUND = ("UNION", "INTERSECT", "EXCEPT")


def hardness(sql: str) -> Hardness:
    """The level of a query; anything that is no query is "easy"."""
    clauses, compound = _outer_clauses(list(tokenize(sql)))
    sources, conditions = _split_joins(clauses.get("FROM", []))
    where, having = clauses.get("WHERE", []), clauses.get("HAVING", [])
    conditions += where + having
    parts = (
        sum(name in clauses for name in ("WHERE", "GROUP", "ORDER", "LIMIT"))
        + max(0, sources - 1)
        + _words(conditions, "OR")
        + _words(conditions, "LIKE")
    )
    nested = compound + _words(conditions, "SELECT")
    others = (
        (_aggregates(clauses) + _words(where, "NOT") + _connectives(having) + _words(having, "NOT") > 1)
        + (_listed(clauses.get("SELECT", [])) > 1)
        + (bool(where) and _connectives(where) > 0)
        + (_listed(clauses.get("GROUP", [])) > 1)
    )
    return _level(parts, nested, others)


def _level(parts: int, nested: int, others: int) -> Hardness:
    if parts <= 1 and others == 0 and nested == 0:
        return "easy"
    if nested == 0 and ((others <= 2 and parts <= 1) or (parts <= 2 and others < 2)):
        return "medium"
    if nested == 0 and ((others > 2 and parts <= 2) or (2 < parts <= 3 and others <= 2)):
        return "hard"
    if parts <= 1 and others == 0 and nested <= 1:
        return "hard"
    return "extra"


def _outer_clauses(tokens: list[Token]) -> tuple[dict[str, list[Token]], int]:
    """The clauses of the outermost (first) query, each with its tokens but without what subqueries hold; 1 for a compound."""
    clauses: dict[str, list[Token]] = {}
    current: list[Token] | None = None
    inner: int | None = None  # depth of the parenthesis around the subquery we are in
    for at, token in enumerate(tokens):
        if inner is not None:
            inner = None if token.text == ")" and token.depth == inner else inner
            continue
        if token.text == "(" and at + 1 < len(tokens) and tokens[at + 1].upper in ("SELECT", "WITH", "VALUES"):
            inner = token.depth
            if current is not None:
                current += [token, tokens[at + 1]]
            continue
        if token.depth == 0 and token.upper in _COMPOUND:
            return clauses, 1
        if token.depth == 0 and token.upper in _CLAUSES:
            current = clauses.setdefault(token.upper, [])
        elif current is not None:
            current.append(token)
    return clauses, 0


def _split_joins(source: Sequence[Token]) -> tuple[int, list[Token]]:
    """How many tables FROM names, and the tokens of its ON conditions."""
    tables, conditions, inside = bool(source), [], False
    for token in source:
        if token.depth == 0 and (token.upper == "JOIN" or token.text == ","):
            tables += 1
            inside = False
        elif token.upper == "ON":
            inside = True
        elif inside:
            conditions.append(token)
    return int(tables), conditions


def _words(tokens: Sequence[Token], word: str) -> int:
    return sum(token.upper == word for token in tokens)


def _connectives(tokens: Sequence[Token]) -> int:
    return _words(tokens, "AND") + _words(tokens, "OR") - _words(tokens, "BETWEEN")


def _aggregates(clauses: dict[str, list[Token]]) -> int:
    return sum(_words(clauses.get(name, []), word) for name in ("SELECT", "GROUP", "ORDER") for word in _AGGREGATES)


def _listed(tokens: Sequence[Token]) -> int:
    return bool(tokens) + sum(token.text == "," and token.depth == 0 for token in tokens)
