"""The comparison of results: properties that must hold for any rows, and the cases that break evaluators."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmlight.sql.compare import Row, Undecided, same

VALUES = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.sampled_from(["", "1", "a", "NULL"]),
    st.binary(max_size=1),
)


@st.composite
def results(draw: st.DrawFn, values: st.SearchStrategy[Any] = VALUES, least: int = 1) -> list[Row]:
    width = draw(st.integers(1, 4))
    return draw(st.lists(st.tuples(*[values] * width), min_size=least, max_size=6))


def permuted(rows: Sequence[Row], order: Sequence[int]) -> list[Row]:
    return [tuple(row[at] for at in order) for row in rows]


def by_brute_force(gold: list[Row], pred: list[Row], ordered: bool) -> bool:
    candidates = (permuted(pred, order) for order in permutations(range(len(gold[0]))))
    return any(gold == rows if ordered else Counter(gold) == Counter(rows) for rows in candidates)


@given(results(), st.randoms(use_true_random=False))
def test_permuting_rows_and_columns_changes_nothing_in_a_bag(rows: list[Row], chance: random.Random) -> None:
    order = chance.sample(range(len(rows[0])), len(rows[0]))
    assert same(rows, permuted(chance.sample(rows, len(rows)), order))


@given(results(), st.randoms(use_true_random=False))
def test_permuting_columns_changes_nothing_in_order(rows: list[Row], chance: random.Random) -> None:
    order = chance.sample(range(len(rows[0])), len(rows[0]))
    assert same(rows, permuted(rows, order), range(len(rows)))


@given(results(), st.data())
def test_one_more_row_always_shows(rows: list[Row], data: st.DataObject) -> None:
    doubled = [*rows, data.draw(st.sampled_from(rows))]
    assert not same(rows, doubled) and not same(doubled, rows)
    assert not same(rows, doubled, range(len(rows)))


@given(results(least=2), st.data())
def test_another_multiplicity_always_shows(rows: list[Row], data: st.DataObject) -> None:
    """The same set of rows, as many of them, but one of another row's copies."""
    first, second = data.draw(st.sampled_from(rows)), data.draw(st.sampled_from(rows))
    gold, pred = [*rows, first], [*rows, second]
    assert same(gold, pred) == by_brute_force(gold, pred, ordered=False)


@settings(max_examples=300)
@given(st.integers(1, 4), st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_it_agrees_with_trying_every_permutation(width: int, height: int, ordered: bool, chance: random.Random) -> None:
    values = chance.choice([[0, 1], [0, None, "a"], [1, 1.0, "1", b"1", 2]])
    gold = [tuple(chance.choice(values) for _ in range(width)) for _ in range(height)]
    pred = permuted(gold, chance.sample(range(width), width))
    if chance.random() < 0.5:
        pred[chance.randrange(height)] = tuple(chance.choice(values) for _ in range(width))
    if chance.random() < 0.3:
        pred = [tuple(chance.sample(row, width)) for row in pred]
    assert same(gold, pred, range(height) if ordered else None) == by_brute_force(gold, pred, ordered)


@given(results(st.floats(1, 1e6)), st.randoms(use_true_random=False))
def test_noise_in_the_last_digits_changes_nothing(rows: list[Row], chance: random.Random) -> None:
    noisy = [tuple(value * (1 + chance.uniform(-1e-12, 1e-12)) for value in row) for row in rows]
    assert same(rows, noisy, range(len(rows)))
    assert same(rows, chance.sample(noisy, len(noisy)))


@pytest.mark.parametrize(
    ("gold", "pred", "match"),
    [
        ([(0.3,)], [(0.1 + 0.2,)], True),
        ([(1, 10)], [(1.0, 10)], True),
        ([(10 / 3,)], [(3.333333333,)], True),
        ([(10 / 3,)], [(3.33333333,)], False),
        ([(12345678901,)], [(12345678902,)], False),
        ([(9007199254740993,)], [(9007199254740992,)], False),
        ([(float("inf"),)], [(1.0,)], False),
        ([(None,)], [("NULL",)], False),
        ([(None,)], [("",)], False),
        ([(1,)], [("1",)], False),
        ([("a",)], [(b"a",)], False),
        ([("Mu\udcf1oz",)], [("Muoz",)], False),
        ([(1, 2), (3, 4)], [(1, 2), (4, 3)], False),
        ([(1, 1), (0, 0)], [(1, 0), (0, 1)], False),
        # a chain of close numbers with distant ends: each must find its own partner
        ([(1.0,), (1 + 4e-10,), (1 + 8e-10,)], [(1 + 8e-10,), (1.0,), (1 + 4e-10,)], True),
        ([(1.0,), (1 + 4e-10,), (1 + 8e-10,)], [(1.0,), (1.0,), (1.0,)], False),
        # a float between two integers does not make them equal
        ([(5_000_000_000,), (5_000_000_000.5,)], [(5_000_000_001,), (5_000_000_001,)], False),
    ],
)
def test_values(gold: list[Row], pred: list[Row], match: bool) -> None:
    assert same(gold, pred) is match
    assert same(pred, gold) is match


def test_ties_may_be_permuted_inside_their_group_only() -> None:
    gold = [("a", 1), ("b", 2), ("c", 2), ("d", 3)]
    groups = [0, 1, 1, 2]
    assert same(gold, [("a", 1), ("c", 2), ("b", 2), ("d", 3)], groups)
    assert same(gold, [(1, "a"), (2, "c"), (2, "b"), (3, "d")], groups)
    assert not same(gold, [("b", 2), ("a", 1), ("c", 2), ("d", 3)], groups)


@pytest.mark.parametrize("width", [10, 19])
def test_many_columns_of_zeros_and_ones_take_no_time(width: int) -> None:
    chance = random.Random(width)
    gold = [tuple(chance.randint(0, 1) for _ in range(width)) for _ in range(12)]
    pred = [tuple(chance.sample(row, width)) for row in gold]
    start = time.thread_time()
    assert not same(gold, pred)
    assert same(gold, permuted(gold, chance.sample(range(width), width)))
    assert same([(0,) * width] * 50, [(0,) * width] * 50, range(50))
    assert time.thread_time() - start < 0.1


def test_a_search_without_end_is_undecided_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmlight.sql.compare.BUDGET", 100)
    ring = [tuple(int(abs(a - b) in (1, 11)) for b in range(12)) for a in range(12)]
    two_rings = [tuple(int(a // 6 == b // 6 and abs(a - b) in (1, 5)) for b in range(12)) for a in range(12)]
    with pytest.raises(Undecided):
        same(ring, two_rings)
