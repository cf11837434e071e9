"""Running moments, the adaptive KL coefficient, and alarms: each raised by what it is for, with its cause, and not before."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight import presets
from slurmlight.errors import UserError
from slurmlight.presets.learning import ScoringSection, StabilitySection
from slurmlight.train.alarms import look
from slurmlight.train.stability import Moments, next_kl_coef, scaled

batches = st.lists(st.lists(st.floats(-1, 1), max_size=8), max_size=8)


@given(batches)
def test_moments_of_batches_are_those_of_all_values(given: list[list[float]]) -> None:
    moments = Moments()
    for batch in given:
        moments = moments.with_batch(batch)
    values = [value for batch in given for value in batch]
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(fmean(values) if values else 0.0, abs=1e-9)
    assert moments.deviation == pytest.approx(pstdev(values) if values else 0.0, abs=1e-7)


def test_rewards_are_normalised_then_clipped() -> None:
    moments = Moments().with_batch([0.0, 0.0, 0.0, 1.0])  # mean .25, deviation sqrt(.1875) = .4330
    assert scaled([0.0, 1.0], moments, ScoringSection()) == [0.0, 1.0]
    assert scaled([0.0, 1.0], moments, ScoringSection(normalize=True)) == pytest.approx([-0.57735, 1.73205], abs=1e-4)
    assert scaled([0.0, 1.0], moments, ScoringSection(normalize=True, clip=1.0)) == pytest.approx([-0.57735, 1.0], abs=1e-4)
    assert scaled([-0.5, 1.0], moments, ScoringSection(clip=0.2)) == [-0.2, 0.2]


@given(st.lists(st.floats(-100, 100), min_size=1), st.floats(0.01, 5))
def test_clipped_rewards_stay_inside(rewards: list[float], clip: float) -> None:
    values = scaled(rewards, Moments().with_batch(rewards), ScoringSection(normalize=True, clip=clip))
    assert all(-clip <= value <= clip for value in values)


def test_the_kl_coefficient_follows_its_target() -> None:
    steady = StabilitySection(target_kl=0.1, kl_coef_max=0.3)
    assert next_kl_coef(0.1, 0.1, 0.1, steady) == 0.1
    assert next_kl_coef(0.1, 0.16, 0.1, steady) == 0.2
    assert next_kl_coef(0.2, 5.0, 0.1, steady) == 0.3, "the documented raise from 0.1 ends at 0.3"
    assert next_kl_coef(0.3, 0.01, 0.1, steady) == 0.15
    assert next_kl_coef(0.1, 0.0, 0.1, steady) == 0.1, "never below where it started"
    assert next_kl_coef(0.1, 9.0, 0.1, StabilitySection()) == 0.1


def rows(count: int, **last: Any) -> list[dict[str, Any]]:
    """``count`` healthy steps; ``last`` replaces values of the last ones: name=[value, value] the last two."""
    healthy = {
        "training/reward": 0.6,
        "actor/entropy": 0.2,
        "actor/ppo_kl": 0.001,
        "actor/pg_loss": 0.1,
        "actor/grad_norm": 1.0,
        "response_length/mean": 13.0,
        "training/n_groups": 12,
        "training/n_zero_adv_groups": 4,
    }
    made = [healthy | {"step": step} for step in range(1, count + 1)]
    for name, values in last.items():
        for row, value in zip(made[-len(values) :], values, strict=True):
            row[name.replace("__", "/")] = value
    return made


def names(found: list[dict[str, Any]], **settings: Any) -> list[str]:
    return [alarm.name for alarm in look(found, StabilitySection(**settings))]


def test_a_healthy_run_raises_nothing() -> None:
    for count in range(12):
        assert names(rows(count)) == []


@pytest.mark.parametrize(
    ("last", "name", "cause"),
    [
        ({"actor__entropy": [0.003, 0.003, 0.003]}, "entropy collapse", "raise entropy_coeff"),
        ({"actor__ppo_kl": [0.9]}, "KL blow-up", "learning rate too high"),
        ({"actor__ppo_kl": [-0.9]}, "KL blow-up", "learning rate too high"),
        ({"actor__kl_loss": [0.9]}, "KL blow-up", "kl_loss_coef, for instance 0.1 to 0.3"),
        ({"training__reward": [0.2, 0.1, 0.2]}, "reward collapse", "ruined the policy"),
        ({"response_length__mean": [50.0, 45.0, 60.0]}, "length explosion", "no longer end"),
        ({"training__n_zero_adv_groups": [12, 12, 12]}, "all-zero groups", "all solved already"),
        (
            {"training__n_zero_adv_groups": [12, 12, 12], "training__reward": [0.32, 0.32, 0.32]},
            "all-zero groups",
            "far too hard",
        ),
        ({"actor__grad_norm": [float("nan")]}, "not a number", "learning rate far too high"),
        ({"training__not_a_number": [1]}, "not a number", "update was left out"),
    ],
)
def test_each_alarm_names_its_likely_cause(last: dict[str, list[float]], name: str, cause: str) -> None:
    found = look(rows(8, **last), StabilitySection())
    assert [alarm.name for alarm in found] == [name]
    assert cause in str(found[0]) and "step 8" in str(found[0]) and "\n" not in str(found[0])
    assert found[0].since == 8 - len(next(iter(last.values()))) + 1


def test_a_trouble_must_last() -> None:
    assert names(rows(8, training__reward=[0.1, 0.1])) == []
    assert names(rows(8, training__reward=[0.1, 0.1]), patience=2) == ["reward collapse"]
    assert names(rows(8, training__reward=[0.1, 0.1, 0.6])) == []


def test_a_limit_of_nought_is_off() -> None:
    bad = rows(
        8, actor__entropy=[0.0] * 3, actor__ppo_kl=[9.0], response_length__mean=[99.0] * 3, training__n_zero_adv_groups=[12] * 3
    )
    assert len(names(bad)) == 4
    assert names(bad, entropy_floor=0, kl_ceiling=0, length_ceiling=0, zero_groups=0) == []
    assert names(rows(8, training__reward=[0.0] * 3), reward_floor=0) == []


def test_harder_tasks_are_no_collapse() -> None:
    easy, hard = rows(8), rows(8, training__reward=[0.2] * 8)
    for row in easy:
        row["curriculum/phase"] = 1
    for row in hard:
        row |= {"curriculum/phase": 2, "step": row["step"] + 8}
    assert names(easy + hard[:4]) == []
    assert names(easy + hard) == []


def test_what_an_engine_does_not_measure_raises_nothing() -> None:
    assert names([{"step": step, "training/reward": 0.5} for step in range(1, 9)]) == []


@pytest.mark.parametrize(
    ("preset", "overrides", "says"),
    [
        ("tiny", ["stability.target_kl=0.1"], "a KL loss that is off"),
        (
            "tiny",
            ["stability.target_kl=0.1", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.5"],
            "start the coefficient inside",
        ),
        (
            "qwen",
            ["stability.target_kl=0.1", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"],
            "kl_ctrl.type=adaptive",
        ),
        ("qwen", ["stability.on_alarm=fallback"], "verl's workers do at a start only"),
        ("qwen", ["scoring.normalize=true"], "before Agent-Lightning makes its rows"),
        ("qwen", ["scoring.clip=1.0"], "before Agent-Lightning makes its rows"),
        ("qwen", ["verl.actor_rollout_ref.actor.strategy=deepspeed"], "verl has no DeepSpeed engine"),
        ("qwen", ["verl.actor_rollout_ref.actor.strategy=megatron"], "use fsdp or fsdp2"),
        ("qwen", ["verl.actor_rollout_ref.actor.optim.optimizer_impl=bitsandbytes.optim"], "in none of the images"),
        ("tiny", ["actor_rollout_ref.model.use_remove_padding=true"], "pads its few short rows"),
        ("tiny", ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"], "keeps everything on the CPU"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_its_reason(preset: str, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        presets.load(preset, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["stability.on_alarm=stop"],
        ["verl.actor_rollout_ref.actor.strategy=fsdp"],
        [
            "actor_rollout_ref.actor.fsdp_config.param_offload=true",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        ],
        ["credit.kind=last", "engine.stack=current"],
    ],
)
def test_what_verl_does_itself_is_not_refused(overrides: list[str]) -> None:
    assert presets.load("qwen", overrides)
