"""Sampling whose noise is a function of (seed, position) alone: the same request gives the same tokens in any company."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1): two rounds of splitmix64 (Steele, Lea, Flood 2014) on a counter, the top 53 bits."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    for _ in range(2):  # neighbouring seeds must not give neighbouring streams
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) / (1 << 53)


def choose(logits: npt.NDArray[np.float32], temperature: float, seed: int, position: int) -> tuple[int, float]:
    """A token and its log-probability from ``logits`` [vocabulary].

    Temperature 0 takes the likeliest token (its log-probability is the unscaled one); otherwise the distribution
    softmax(logits / temperature) is sampled by its inverse, and the log-probability is that distribution's.
    """
    scaled = logits.astype(np.float64)
    if temperature > 0:
        scaled /= temperature
    scaled -= scaled.max()
    cumulative = np.cumsum(np.exp(scaled))
    if temperature > 0:
        token = int(np.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], side="right"))
        token = min(token, len(cumulative) - 1)  # a product that rounds up to the sum
    else:
        token = int(scaled.argmax())
    return token, float(scaled[token] - np.log(cumulative[-1]))
