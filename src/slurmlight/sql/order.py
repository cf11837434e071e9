"""Does a query fix the order of its rows, and which rows tie? Only an ORDER BY outside every parenthesis orders a result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slurmlight.sql.tokens import Token, tokenize

_COMPOUND = ("UNION", "INTERSECT", "EXCEPT")
_COLLATE = re.compile(r"\s+COLLATE\s+\S+$", re.IGNORECASE)
_NUMBER = re.compile(r"\+?\s*\d+")
_NAME = re.compile(r'\w+|"[^"]+"|`[^`]+`|\[[^\]]+\]')
_DIRECTION = ("ASC", "DESC", "NULLS", "FIRST", "LAST")


@dataclass(frozen=True)
class OrderBy:
    """The top-level ORDER BY of a query: its keys as written, without direction."""

    sql: str
    keys: tuple[str, ...]
    insert_at: int | None  # where further result columns can be added; None: DISTINCT, compound or without FROM


def top_level_order(sql: str) -> OrderBy | None:
    """The ORDER BY that orders the result of ``sql``; None where there is none."""
    tokens = list(tokenize(sql))
    flat = [token for token in tokens if token.depth == 0]
    start = next((at for at, (a, b) in enumerate(pairwise(flat)) if a.upper == "ORDER" and b.upper == "BY"), None)
    if start is None:
        return None
    return OrderBy(sql, tuple(_keys(sql, tokens, flat[start + 1])), _insertion(flat[:start]))


def _keys(sql: str, tokens: list[Token], by: Token) -> list[str]:
    keys, first, last = [], None, None
    for token in tokens:
        if token.start < by.end:
            continue
        outside = token.depth == 0
        if outside and (token.text in (",", ";") or token.upper == "LIMIT"):
            if first is not None and last is not None:
                keys.append(sql[first:last])
            first = last = None
            if token.text != ",":
                return keys
        elif not (outside and token.upper in _DIRECTION):
            first = token.start if first is None else first
            last = token.end
    if first is not None and last is not None:
        keys.append(sql[first:last])
    return keys


def _insertion(flat: list[Token]) -> int | None:
    """The offset of the one top-level FROM, where a comma and more columns fit in front of it."""
    words = [token.upper for token in flat]
    if words.count("SELECT") != 1 or any(word in _COMPOUND for word in words):
        return None
    select = words.index("SELECT")
    if words[select + 1 : select + 2] == ["DISTINCT"]:
        return None
    starts = [b.start for a, b in pairwise(flat[select:]) if b.upper == "FROM" and a.upper != "DISTINCT"]  # IS DISTINCT FROM
    return starts[0] if starts else None


def with_keys(order: OrderBy, columns: Sequence[str]) -> tuple[str, list[int]] | None:
    """A query that also returns every order key, and the positions of the keys in its rows; None where it cannot be written.

    A key that is the number or the unique name of a result column is that column, as in SQLite, with or without parentheses.
    """
    names = [name.lower() for name in columns]
    places: list[int] = []
    added: list[str] = []
    for key in order.keys:
        term = _COLLATE.sub("", key)
        while term.startswith("(") and term.endswith(")") and not re.search("[()]", term[1:-1]):
            term = term[1:-1].strip()
        name = term.strip('"`[]').lower()
        if _NUMBER.fullmatch(term):
            places.append(int(term.strip("+ ")) - 1)
        elif names.count(name) == 1 and _NAME.fullmatch(term):
            places.append(names.index(name))
        else:
            places.append(len(names) + len(added))
            added.append(f"({key})")
    if not added:
        return order.sql, places
    if order.insert_at is None:
        return None
    # on lines of their own: the select list may end in a comment
    return f"{order.sql[: order.insert_at]}\n, {', '.join(added)}\n{order.sql[order.insert_at :]}", places


def tie_groups(rows: Sequence[tuple[Any, ...]], places: Sequence[int]) -> list[int]:
    """The number of the tie group of each row of an ordered result: neighbours with equal keys share one."""
    keys = [tuple(row[at] for at in places) for row in rows]
    groups = [0] * len(keys)
    for at, (before, key) in enumerate(pairwise(keys), start=1):
        groups[at] = groups[at - 1] + (key != before)
    return groups
