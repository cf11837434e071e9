"""Intervals and tests for shares of right answers. Pure functions on counts, standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


def wilson(right: int, total: int) -> tuple[float, float]:
    """95 % score interval of a share (E. B. Wilson, JASA 1927). (0, 1) where nothing was counted."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = right / total, Z95 * Z95
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    # at the ends exactly 0 and 1: rounding must not leave a trace of either
    return (max(0.0, centre - half) if right else 0.0), (min(1.0, centre + half) if right < total else 1.0)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % normal interval of a mean over questions. Samples of one question depend on each other: average them first."""
    if len(values) < 2:
        return 0.0, 1.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = Z95 * math.sqrt(variance / len(values))
    return max(0.0, mean - half), min(1.0, mean + half)


def mcnemar(won: int, lost: int) -> float:
    """Exact two-sided p-value of McNemar's test: how likely so uneven a split of changed questions is by chance."""
    changed = won + lost
    tail = sum(math.comb(changed, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)
