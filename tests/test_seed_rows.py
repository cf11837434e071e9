"""Which rows the seed stack's update takes: whole mini batches, and nothing else is lost before rows that teach nothing."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from slurmlight.train.seed.rows import whole_mini_batches


def test_a_batch_of_whole_mini_batches_stays_as_it_is() -> None:
    assert whole_mini_batches(["a", "a", "b", "b"], [1, 0, 1, 1], 2) == [0, 1, 2, 3]


def test_rows_of_equal_groups_go_first() -> None:
    groups, scores = ["a", "a", "b", "b", "b"], [1.0, 0.0, 1.0, 1.0, 1.0]
    for seed in range(20):
        random.seed(seed)
        assert {0, 1} <= set(whole_mini_batches(groups, scores, 4))
        assert {0, 1} <= set(whole_mini_batches(groups, scores, 3))


def test_fewer_than_a_mini_batch_is_nothing() -> None:
    assert whole_mini_batches(["a", "b", "b"], [1, 0, 1], 4) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])), max_size=40), st.integers(1, 9), st.integers())
def test_any_batch(rows: list[tuple[int, float]], unit: int, seed: int) -> None:
    groups, scores = [group for group, _ in rows], [score for _, score in rows]
    random.seed(seed)
    kept = whole_mini_batches(groups, scores, unit)
    assert len(kept) == len(rows) // unit * unit
    assert kept == sorted(set(kept))
    teaches = {
        row
        for row in range(len(rows))
        if len({scores[other] for other in range(len(rows)) if groups[other] == groups[row]}) > 1
    }
    gone = set(range(len(rows))) - set(kept)
    assert not gone & teaches or gone >= set(range(len(rows))) - teaches  # teaching rows go only after all others
    random.seed(seed)
    assert whole_mini_batches(groups, scores, unit) == kept
