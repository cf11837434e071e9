"""Which rows of a batch the update takes. verl 0.5 cuts a batch to whole mini batches after the advantages, at random."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Sequence


def whole_mini_batches(groups: Sequence[Hashable], scores: Sequence[float], unit: int) -> list[int]:
    """Indices of the rows that stay, in order: a multiple of ``unit`` of them.

    ``groups`` and ``scores`` are of each row; rows of groups whose scores are all equal go first: they teach nothing. Which
    of them is drawn from ``random``'s state. Done before the advantages, so that no group's mean counts a row that is
    not trained on.
    """
    seen: dict[Hashable, set[float]] = defaultdict(set)
    for group, score in zip(groups, scores, strict=True):
        seen[group].add(score)
    order = random.sample(range(len(groups)), len(groups))
    order.sort(key=lambda row: len(seen[groups[row]]) > 1)
    gone = set(order[: len(groups) % unit])
    return [row for row in range(len(groups)) if row not in gone]
