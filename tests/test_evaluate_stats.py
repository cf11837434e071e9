"""Intervals and McNemar's test against their definitions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight.evaluate.stats import Z95, mcnemar, mean_interval, wilson


@given(st.integers(1, 5000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_wilson_ends_are_where_the_score_test_just_rejects(counts: tuple[int, int]) -> None:
    right, total = counts
    low, high = wilson(right, total)
    share = right / total
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(share - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / total), rel=1e-6)


def test_nothing_counted_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert mean_interval([0.5]) == (0.0, 1.0)


def test_the_documented_run_has_an_interval_of_eight_points() -> None:
    low, high = wilson(309, 500)
    assert (round(low, 3), round(high, 3)) == (0.575, 0.660)


def test_mean_interval_is_over_questions() -> None:
    """Four times the same sample is no more evidence than one."""
    assert mean_interval([1.0, 0.0] * 50) == pytest.approx((0.5 - 0.0985, 0.5 + 0.0985), abs=1e-3)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_test_of_a_fair_coin(won: int, lost: int) -> None:
    changed = won + lost
    chances = [Fraction(math.comb(changed, k), 2**changed) for k in range(changed + 1)]
    as_rare = sum((chance for chance in chances if chance <= chances[won]), Fraction(0))
    assert mcnemar(won, lost) == pytest.approx(float(as_rare))
    assert mcnemar(won, lost) == mcnemar(lost, won)


def test_mcnemar_of_many_questions_is_a_number() -> None:
    assert 0 < mcnemar(900, 1100) < 1e-4
