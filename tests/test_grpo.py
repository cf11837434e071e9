"""GRPO's formulas against verl's own numbers: recorded ones always, live ones where verl is installed."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmlight.presets.schema import ActorSection
from slurmlight.train.embedded.grpo import Tokens, advantages, low_variance_kl, policy_loss
from tests.reference.grpo_verl import GROUP, GROUPS, batch, by_verl

SAME = {"rel": 0.0, "abs": 1e-6}
ACTOR = ActorSection(clip_ratio_low=0.2, clip_ratio_high=0.3)


def recorded() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "reference/grpo.json").read_text())


@pytest.fixture(params=["recorded", "live"])
def verl(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "recorded":
        return recorded()
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed; its recorded numbers are compared")
    return by_verl()


def ours() -> tuple[Tokens, torch.Tensor]:
    """The reference batch as one micro batch of trained tokens; and the log-probabilities, as a leaf that has a gradient."""
    given = batch()
    rewards, lengths = given["rewards"], given["lengths"]
    per_row = [value for group in range(GROUPS) for value in advantages(rewards[group * GROUP : (group + 1) * GROUP]) or []]

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([x for row, length in zip(given[name], lengths, strict=True) for x in row[:length]])

    new = flat("log_prob").requires_grad_()
    repeated = torch.tensor([value for value, length in zip(per_row, lengths, strict=True) for _ in range(length)])
    return Tokens(new, torch.zeros_like(new), flat("old_log_prob"), repeated, flat("ref_log_prob")), new


@pytest.mark.parametrize(("by_std", "name"), [(True, "advantages"), (False, "centred")])
def test_advantages_are_verls(verl: dict[str, Any], by_std: bool, name: str) -> None:
    rewards = batch()["rewards"]
    for group in range(GROUPS):
        rows = slice(group * GROUP, (group + 1) * GROUP)
        assert advantages(rewards[rows], by_std) == pytest.approx(verl[name][rows], **SAME)


def test_loss_its_gradient_and_its_metrics_are_verls(verl: dict[str, Any]) -> None:
    tokens, new = ours()
    count = len(new)
    loss = policy_loss(tokens, ACTOR)
    (loss.total / count).backward()
    assert loss.policy / count == pytest.approx(verl["loss"], **SAME)
    assert loss.kl / count == pytest.approx(verl["ppo_kl"], **SAME)
    assert loss.clipped_high / count == pytest.approx(verl["clipfrac"], **SAME)
    assert loss.clipped_low / count == pytest.approx(verl["clipfrac_lower"], **SAME)
    assert min(verl["clipfrac"], verl["clipfrac_lower"]) > 0, "the batch must reach every branch"
    lengths = batch()["lengths"]
    wanted = [value for row, length in zip(verl["gradient"], lengths, strict=True) for value in row[:length]]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(wanted, **SAME)


def test_kl_against_the_reference_is_verls(verl: dict[str, Any]) -> None:
    tokens, _ = ours()
    assert tokens.reference_logprobs is not None
    ours_kl = low_variance_kl(tokens.logprobs.detach(), tokens.reference_logprobs).mean().item()
    assert ours_kl == pytest.approx(verl["low_var_kl"], **SAME)


def test_kl_and_entropy_enter_the_loss_only_where_the_preset_has_them_on() -> None:
    tokens, new = ours()
    tokens = Tokens(new, new * 0 + 2.0, tokens.old_logprobs, tokens.advantages, tokens.reference_logprobs)
    plain, entropy = policy_loss(tokens, ACTOR), policy_loss(tokens, ActorSection(clip_ratio_high=0.3, entropy_coeff=0.5))
    with_kl = policy_loss(tokens, ActorSection(clip_ratio_high=0.3, use_kl_loss=True, kl_loss_coef=0.1))
    assert plain.total.item() == pytest.approx(plain.policy)
    assert entropy.total.item() == pytest.approx(plain.policy - 0.5 * 2.0 * len(new), rel=1e-5)
    assert with_kl.reference_kl > 0
    assert with_kl.total.item() == pytest.approx(plain.policy + 0.1 * with_kl.reference_kl, rel=1e-5)


def test_a_group_without_differences_has_nothing_to_teach() -> None:
    assert advantages([1.0, 1.0, 1.0]) is None
    assert advantages([0.0]) is None
    assert advantages([]) is None


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=16), st.randoms())
def test_advantages_follow_their_episodes_through_any_order(rewards: list[float], rng: random.Random) -> None:
    values = advantages(rewards)
    order = list(range(len(rewards)))
    rng.shuffle(order)
    shuffled = advantages([rewards[index] for index in order])
    if values is None:
        assert shuffled is None
        return
    assert shuffled == pytest.approx([values[index] for index in order], abs=1e-9)
    assert sum(values) == pytest.approx(0.0, abs=1e-6)
