"""Rewards kept to one scale, and a KL coefficient that follows its target: small states, kept in the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from slurmlight.presets.learning import ScoringSection, StabilitySection

TOO_FAR = 1.5  # Schulman et al. 2017 (arXiv 1707.06347, section 4): beyond this factor of the target the coefficient moves,
STEP = 2.0  # by this factor
EPSILON = 1e-6


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of all rewards so far (Welford 1962; Chan et al. 1979 for whole batches)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_batch(self, values: Sequence[float]) -> Moments:
        if not values:
            return self
        size = len(values)
        mean = sum(values) / size
        squares = sum((value - mean) ** 2 for value in values)
        total, apart = self.count + size, mean - self.mean
        return Moments(
            total,
            self.mean + apart * size / total,
            self.squares + squares + apart * apart * self.count * size / total,
        )

    @property
    def deviation(self) -> float:
        return sqrt(self.squares / self.count) if self.count else 0.0


def scaled(rewards: Sequence[float], moments: Moments, scoring: ScoringSection) -> list[float]:
    """``rewards`` as training uses them; ``moments`` already hold them."""
    values = list(rewards)
    if scoring.normalize:
        values = [(value - moments.mean) / (moments.deviation + EPSILON) for value in values]
    if scoring.clip:
        values = [max(-scoring.clip, min(scoring.clip, value)) for value in values]
    return values


def next_kl_coef(coef: float, kl: float, lowest: float, steady: StabilitySection) -> float:
    """The coefficient after a step whose KL against the reference was ``kl``: doubled or halved within its bounds."""
    if steady.target_kl <= 0:
        return coef
    if kl > steady.target_kl * TOO_FAR:
        coef *= STEP
    elif kl < steady.target_kl / TOO_FAR:
        coef /= STEP
    return max(lowest, min(steady.kl_coef_max, coef))
