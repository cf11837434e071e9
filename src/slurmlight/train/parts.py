"""Metrics of a composed reward, the same in every engine, from what runners tell of each episode (rollouts.player.Parts)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal


def part_metrics(told: Sequence[Mapping[str, Any]], kind: Literal["training", "val"]) -> dict[str, float]:
    """Means of the parts, of plain execution match, and in validation of the composed reward; nothing where nothing is told."""
    if not told:
        return {}
    size = len(told)
    parts = {f"{kind}/reward/{name}": sum(one["rewards"][name] for one in told) / size for name in told[0]["rewards"]}
    plain = {f"{kind}/execution_match": sum(one["plain"] for one in told) / size}
    shaped = {"val/shaped_reward": sum(one["reward"] for one in told) / size} if kind == "val" else {}
    return parts | plain | shaped
