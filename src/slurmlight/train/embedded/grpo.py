"""GRPO's formulas in torch: advantages of groups and the clipped token-mean loss, as verl computes them.

Source of both: verl 0.9.1, trainer/ppo/core_algos.py (compute_grpo_outcome_advantage, compute_policy_loss_vanilla,
agg_loss, kl_penalty); DeepSeekMath (arXiv 2402.03300) for the group, dual clip from arXiv 1912.09729.
tests/test_grpo.py holds the same numbers computed by verl itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slurmlight.presets.schema import ActorSection

EPSILON = 1e-6  # verl's, beside the deviation
DUAL_CLIP = 3.0  # verl's default clip_ratio_c: bounds the loss where the advantage is negative and the ratio large


def advantages(rewards: Sequence[float], by_std: bool = True) -> list[float] | None:
    """The advantage of each episode of a group: (r - mean) / (std + 1e-6) with the sample deviation (n - 1), as verl.

    ``by_std`` False leaves the division out (arXiv 2503.20783). None where there is nothing to learn: fewer than two
    episodes, or equal rewards.
    """
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return None
    values = torch.tensor(rewards, dtype=torch.float64)
    centred = values - values.mean()
    return (centred / (values.std() + EPSILON) if by_std else centred).tolist()


def scale(rewards: Sequence[float], by_std: bool = True) -> float:
    """What ``advantages`` divided the centred rewards by."""
    return (torch.tensor(rewards, dtype=torch.float64).std() + EPSILON).item() if by_std else 1.0


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a micro batch, one after the other: every tensor is [tokens], advantages repeated per token."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    reference_logprobs: torch.Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """Sums over tokens: divide by the mini batch's token count for verl's token mean. Only ``total`` has a gradient."""

    total: torch.Tensor
    policy: float
    kl: float
    clipped_high: float
    clipped_low: float
    entropy: float
    reference_kl: float


def policy_loss(tokens: Tokens, actor: ActorSection) -> Loss:
    """The clipped loss, minus the entropy bonus, plus the KL against the reference where the preset has them on."""
    advantage = tokens.advantages
    log_ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
    worst = torch.maximum(plain, clipped)
    bound = -advantage * DUAL_CLIP
    policy = torch.where(advantage < 0, torch.minimum(worst, bound), worst).sum()
    entropy = tokens.entropy.sum()
    reference_kl = torch.zeros(())
    if actor.use_kl_loss and tokens.reference_logprobs is not None:
        reference_kl = low_variance_kl(tokens.logprobs, tokens.reference_logprobs).sum()
    total = policy - actor.entropy_coeff * entropy + actor.kl_loss_coef * reference_kl
    with torch.no_grad():
        return Loss(
            total=total,
            policy=policy.item(),
            kl=-log_ratio.sum().item(),
            clipped_high=(clipped > plain).sum().item(),
            clipped_low=((worst > bound) & (advantage < 0)).sum().item(),
            entropy=entropy.item(),
            reference_kl=reference_kl.item(),
        )


def low_variance_kl(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimator of the KL divergence, clamped as verl's low_var_kl."""
    difference = (reference - logprobs).clamp(-20.0, 20.0)
    return (difference.exp() - difference - 1).clamp(-10.0, 10.0)
