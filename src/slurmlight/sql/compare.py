"""Are two results the same? Rows as a bag, in order or by groups; columns in any order; numbers within a tolerance.

Every form is one problem: each row carries a group number (all 0: a bag; its position: strict order; its tie group: an ORDER
BY with ties), and the results match iff one permutation of the columns makes the two bags of (group, row) equal.

Values: int and float by value, text by code points, BLOB equals BLOB only, NULL equals NULL only; text never equals a number.
These are Python's own rules for what sqlite3 returns, so equality and hashing run in C.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from math import isclose
from typing import Any

type Row = tuple[Any, ...]
type Groups = Sequence[int] | None  # the group of each row; None: one group, a bag

RELATIVE_TOLERANCE = 5e-10  # half a unit of the tenth significant digit
BUDGET = 5_000_000  # values that one search for a permutation may look at, about a second


class Undecided(Exception):
    """The search for a column permutation ran out of its budget: neither equal nor different is known."""


def same(gold: Sequence[Row], pred: Sequence[Row], groups: Groups = None, tolerant: bool = True) -> bool:
    """Whether the results match. All rows of both must have one width. Raises Undecided."""
    if gold == pred:
        return True
    if len(gold) != len(pred):
        return False
    if same_exactly(gold, pred, groups):
        return True
    if not tolerant:
        return False
    merged, loose = _close_values(gold, pred)
    if not merged:
        return False
    near_gold, near_pred = ([tuple(map(merged.get, row, row)) for row in rows] for rows in (gold, pred))
    if not loose:
        return same_exactly(near_gold, near_pred, groups)
    return any(
        _confirmed(gold, [tuple(row[at] for at in permutation) for row in pred], merged, groups)
        for permutation in permutations(near_gold, near_pred, groups)
    )


def same_exactly(gold: Sequence[Row], pred: Sequence[Row], groups: Groups) -> bool:
    """``same`` without the tolerance."""
    if groups is None:
        if Counter(gold) == Counter(pred):
            return True
        if len(gold[0]) == 1:
            return False
    return next(permutations(gold, pred, groups), None) is not None


def permutations(gold: Sequence[Row], pred: Sequence[Row], groups: Groups) -> Iterator[tuple[int, ...]]:
    """Every permutation p (up to equal columns) with equal bags of (group, gold row) and (group, pred row permuted by p).

    Columns can only map to columns with the same bag of values. Then one column after the other is added, rarest first, and
    the bags of row prefixes compared: a wrong choice shows long before whole rows are built.
    """
    gold_columns, pred_columns = list(zip(*gold, strict=True)), list(zip(*pred, strict=True))
    start = list(groups) if groups is not None else [0] * len(gold)
    places: dict[frozenset[Any], list[int]] = defaultdict(list)
    for at, column in enumerate(pred_columns):
        places[_bag(start, column, groups)].append(at)
    candidates = [places.get(_bag(start, column, groups), []) for column in gold_columns]
    if not all(candidates):
        return
    # Equal columns are interchangeable, so each distinct column gets a number and one order of choices is tried.
    kinds: dict[Row, int] = {}
    gold_kinds = [kinds.setdefault(column, len(kinds)) for column in gold_columns]
    pred_kinds = [kinds.setdefault(column, len(kinds)) for column in pred_columns]
    order = sorted(range(len(gold_columns)), key=lambda at: (len(candidates[at]), candidates[at][0], gold_kinds[at], at))
    chosen: list[int] = []
    left = BUDGET

    def extend(gold_ids: list[int], pred_ids: list[int]) -> Iterator[tuple[int, ...]]:
        nonlocal left
        depth = len(chosen)
        if depth == len(order):
            yield tuple(place for _, place in sorted(zip(order, chosen, strict=True)))
            return
        at = order[depth]
        least = chosen[-1] if depth and gold_kinds[at] == gold_kinds[order[depth - 1]] else -1
        tried: set[int] = set()
        for place in candidates[at]:
            if place < least or place in chosen or pred_kinds[place] in tried:
                continue
            tried.add(pred_kinds[place])
            left -= 2 * len(gold)
            if left < 0:
                raise Undecided
            refined = _refine(gold_ids, gold_columns[at], pred_ids, pred_columns[place])
            if refined:
                chosen.append(place)
                yield from extend(*refined)
                chosen.pop()

    yield from extend(start, start)


def _bag(groups: list[int], column: Row, grouped: Groups) -> frozenset[Any]:
    return frozenset(Counter(column if grouped is None else zip(groups, column, strict=True)).items())


def _refine(gold_ids: list[int], gold: Row, pred_ids: list[int], pred: Row) -> tuple[list[int], list[int]] | None:
    """Number the (prefix, value) pairs of both sides alike; None where the two bags of them differ."""
    numbers: dict[tuple[int, Any], int] = {}
    new_gold = [numbers.setdefault(pair, len(numbers)) for pair in zip(gold_ids, gold, strict=True)]
    new_pred = [numbers.get(pair, -1) for pair in zip(pred_ids, pred, strict=True)]
    return (new_gold, new_pred) if Counter(new_gold) == Counter(new_pred) else None


def _close_values(gold: Sequence[Row], pred: Sequence[Row]) -> tuple[dict[Any, Any], bool]:
    """A map that makes close numbers equal ({} where none are), and whether it may join more than it should.

    Closeness is no equivalence: a chain of close numbers may have distant ends, a float may lie between two integers (which
    are equal only if identical). Such maps are "loose": a match must then be confirmed on the values themselves.
    """
    values = [value for row in chain(gold, pred) for value in row if type(value) is float or type(value) is int]
    floats = {value for value in values if type(value) is float}
    merged: dict[Any, Any] = {}
    loose = False
    first: Any = None
    integers = 0
    for low, high in pairwise(sorted(set(values)) if floats else ()):
        if not (low in floats or high in floats) or not isclose(low, high, rel_tol=RELATIVE_TOLERANCE):
            first = None
            continue
        if first is None:
            first, integers = low, low not in floats
        merged[high] = first
        integers += high not in floats
        loose = loose or integers > 1 or not isclose(first, high, rel_tol=RELATIVE_TOLERANCE)
    return merged, loose


def _confirmed(gold: Sequence[Row], pred: Sequence[Row], merged: dict[Any, Any], groups: Groups) -> bool:
    """Whether rows that agree after merging can be paired so that each pair is close in every column."""
    piles: tuple[dict[Any, list[Row]], dict[Any, list[Row]]] = (defaultdict(list), defaultdict(list))
    for rows, pile in zip((gold, pred), piles, strict=True):
        for group, row in zip(groups or [0] * len(rows), rows, strict=True):
            pile[group, *map(merged.get, row, row)].append(row)
    # Rows of one pile differ in numbers only, so they sort; in one dimension pairing in sorted order is the best there is.
    return all(
        _close(value, other)
        for key, rows in piles[0].items()
        for row, near in zip(sorted(rows), sorted(piles[1][key]), strict=True)
        for value, other in zip(row, near, strict=True)
    )


def _close(value: Any, other: Any) -> bool:
    return value == other or (
        (type(value) is float or type(other) is float) and isclose(value, other, rel_tol=RELATIVE_TOLERANCE)
    )
