"""How an episode's advantage reaches its calls, by hand-computed values; the baseline is taken over episodes, not over calls."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight import presets
from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.presets.learning import CreditSection
from slurmlight.train.credit import of_calls, shares
from slurmlight.train.embedded.batch import make_batch
from slurmlight.train.parts import part_metrics
from slurmlight.train.rollouts.play import Call, Job, Played

MIX = 'reward=[{name="execution_match",weight=0.6},{name="process",weight=0.4}]'


def credit(kind: Any = "all", gamma: float = 0.5) -> CreditSection:
    return CreditSection(kind=kind, gamma=gamma)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all", [1.0, 1.0, 1.0]), ("last", [0.0, 0.0, 1.0]), ("discounted", [0.25, 0.5, 1.0]), ("process", [1.0, 1.0, 1.0])],
)
def test_shares_of_three_calls(kind: str, expected: list[float]) -> None:
    assert shares(3, credit(kind)) == expected
    assert of_calls(-2.0, 3, credit(kind)) == [-2.0 * share for share in expected]
    assert shares(0, credit(kind)) == []
    assert shares(1, credit(kind)) == [1.0]


def test_the_process_part_falls_to_the_call_that_earned_it() -> None:
    assert of_calls(1.0, 2, credit("process"), [0.0, 0.4], scale=0.5) == pytest.approx([0.6, 1.4])
    assert of_calls(1.0, 2, credit("process"), [], scale=0.5) == [1.0, 1.0]


kinds = st.sampled_from(["all", "last", "discounted", "process"])
numbers = st.floats(-10, 10)


@given(kinds, st.integers(1, 6), st.floats(0, 1), numbers)
def test_no_call_gets_more_or_other_than_its_episode(kind: str, calls: int, gamma: float, advantage: float) -> None:
    shared = of_calls(advantage, calls, credit(kind, gamma))
    assert shared[-1] == advantage
    assert all(abs(share) <= abs(advantage) and share * advantage >= 0 for share in shared)


@given(st.integers(1, 6), numbers)
def test_gamma_one_is_all_and_gamma_zero_is_last(calls: int, advantage: float) -> None:
    assert of_calls(advantage, calls, credit("discounted", 1.0)) == of_calls(advantage, calls, credit("all"))
    assert of_calls(advantage, calls, credit("discounted", 0.0)) == pytest.approx(of_calls(advantage, calls, credit("last")))


@given(numbers, st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_process_credit_leaves_the_episode_its_mean(advantage: float, parts: list[float]) -> None:
    shared = of_calls(advantage, len(parts), credit("process"), parts)
    assert sum(shared) / len(shared) == pytest.approx(advantage, abs=1e-9)


def small(*overrides: str) -> Preset:
    return presets.load(
        "tiny",
        [
            "data.train_batch_size=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.rollout.n=2",
            *overrides,
        ],
    )


def episode(reward: float, calls: int, scores: list[float] | None = None) -> Played:
    told = {
        "rewards": {"execution_match": 1.0, "process": 0.5},
        "plain": 1.0,
        "reward": reward,
        "calls": scores or [],
    }
    made = tuple(Call((1, place), (2,), (0.0,)) for place in range(calls))
    return Played(Job("", {}, True), reward, calls=made, parts=told if scores is not None else {})


def advantages_of(preset: Preset, *episodes: Played) -> list[tuple[int, int, float]]:
    """(sample, call, advantage) of every row."""
    (rows,) = make_batch(episodes, preset).mini_batches
    return [(row.sample, row.prompt[1], row.advantage) for row in rows]


def test_a_long_episode_weighs_no_more_in_the_baseline() -> None:
    """Rewards 1 and 0: mean 1/2 and deviation sqrt(1/2) over the two episodes, whatever their calls."""
    up = 0.5 / (sqrt(0.5) + 1e-6)
    rows = advantages_of(small(), episode(1.0, 1), episode(0.0, 3))
    assert rows == [(0, 0, pytest.approx(up)), *((1, call, pytest.approx(-up)) for call in range(3))]


def test_calls_without_credit_do_not_train() -> None:
    up = 0.5 / (sqrt(0.5) + 1e-6)
    rows = advantages_of(small("credit.kind=last"), episode(1.0, 2), episode(0.0, 3))
    assert rows == [(0, 1, pytest.approx(up)), (1, 2, pytest.approx(-up))]
    rows = advantages_of(small("credit.kind=discounted", "credit.gamma=0.5"), episode(1.0, 2), episode(0.0, 1))
    assert rows == [(0, 0, pytest.approx(up / 2)), (0, 1, pytest.approx(up)), (1, 0, pytest.approx(-up))]


def test_process_credit_in_a_group() -> None:
    """The mix pays 0.4 for process: the calls of the first episode earned 0 and 0.4, its mean is 0.2."""
    deviation = sqrt(0.5) * 0.8 + 1e-6  # of rewards 0.8 and 0.0
    rows = advantages_of(small("credit.kind=process", MIX), episode(0.8, 2, [0.0, 1.0]), episode(0.0, 1, [0.0]))
    expected = [(0.4 - 0.2) / deviation, (0.4 + 0.2) / deviation, -0.4 / deviation]
    assert [value for _, _, value in rows] == pytest.approx(expected)


def test_equal_rewards_teach_nothing_whatever_the_credit() -> None:
    for kind in ("all", "last", "discounted"):
        assert advantages_of(small(f"credit.kind={kind}"), episode(1.0, 2), episode(1.0, 1)) == []


def test_parts_are_told_apart() -> None:
    told = [
        {"reward": 0.8, "rewards": {"execution_match": 1.0, "process": 0.5}, "plain": 1.0},
        {"reward": 0.2, "rewards": {"execution_match": 0.0, "process": 0.5}, "plain": 0.0},
    ]
    parts = {"reward/execution_match": 0.5, "reward/process": 0.5, "execution_match": 0.5}
    assert part_metrics(told, "training") == {f"training/{name}": value for name, value in parts.items()}
    assert part_metrics(told, "val") == {f"val/{name}": value for name, value in parts.items()} | {"val/shaped_reward": 0.5}
    assert part_metrics([], "training") == {}, "execution match alone is the reward itself"


@pytest.mark.parametrize(
    ("preset", "overrides", "says"),
    [
        ("tiny", ["credit.kind=process"], "needs the reward that it takes apart"),
        ("qwen", ["engine.stack=current", "credit.kind=process", MIX], "Agent-Lightning hands verl one an episode"),
    ],
)
def test_credit_that_cannot_be_given_is_refused(preset: str, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        presets.load(preset, overrides)
