"""How difficult a task is, from 0 to 1: by Spider's hardness of its gold query, or by how often it was solved."""

from __future__ import annotations

from slurmlight.sql.hardness import hardness

LEVELS = {"easy": 0.25, "medium": 0.5, "hard": 0.75, "extra": 1.0}
PRIOR_TRIES = 2.0  # what the gold query says counts as that many tries


def by_hardness(gold: str) -> float:
    return LEVELS[hardness(gold)]


def by_solve_rate(prior: float, tried: int, solved: float) -> float:
    """1 - the solve rate, smoothed towards ``prior``: a task that was never tried is as difficult as its gold says."""
    return 1.0 - (solved + PRIOR_TRIES * (1.0 - prior)) / (tried + PRIOR_TRIES)


def mixedness(tried: int, solved: float) -> float:
    """How much a task may teach: 4 p (1 - p) of its smoothed solve rate p, never quite 0; 1.05 for one that was never tried."""
    rate = (solved + 1.0) / (tried + 2.0)
    return 0.05 + 4.0 * rate * (1.0 - rate)
