"""From played episodes to what the update learns from: advantages, mini batches, and a step's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmlight.presets import Preset
from slurmlight.tracking.names import REWARD
from slurmlight.train.credit import of_calls
from slurmlight.train.embedded.actor import Row
from slurmlight.train.embedded.grpo import advantages, scale
from slurmlight.train.parts import part_metrics
from slurmlight.train.rollouts.play import Played


@dataclass(frozen=True)
class Batch:
    """Rows by mini batches of ``ppo_mini_batch_size`` tasks. ``groups`` were played, ``uniform`` of them teach nothing."""

    mini_batches: list[list[Row]]
    groups: int
    uniform: int


def make_batch(played: Sequence[Played], preset: Preset) -> Batch:
    """``played`` holds the ``rollout.n`` episodes of each task, task after task. Failed episodes leave their group smaller."""
    n, size = preset.actor_rollout_ref.rollout.n, preset.actor_rollout_ref.actor.ppo_mini_batch_size
    groups = [_rows(task, played[start : start + n], preset) for task, start in enumerate(range(0, len(played), n))]
    mini_batches = [[row for group in groups[start : start + size] for row in group] for start in range(0, len(groups), size)]
    return Batch(mini_batches, len(groups), sum(not group for group in groups))


def _rows(task: int, group: Sequence[Played], preset: Preset) -> list[Row]:
    """Every learning call with its share of its episode's advantage; none where the group has nothing to compare."""
    by_std, credit = preset.algorithm.norm_adv_by_std_in_grpo, preset.credit
    scored = [(sample, one, one.reward) for sample, one in enumerate(group) if one.reward is not None]
    rewards = [reward for _, _, reward in scored]
    values = advantages(rewards, by_std)
    if values is None:
        return []
    weight = sum(part.weight for part in preset.reward if part.name == "process")
    divisor = scale(rewards, by_std) if credit.kind == "process" else 1.0
    rows = []
    for (sample, one, _), value in zip(scored, values, strict=True):
        parts = [weight * score for score in one.parts.get("calls", ())]
        shared = of_calls(value, len(one.calls), credit, parts, divisor)
        rows += [
            Row(task, sample, call.prompt, call.response, call.logprobs, share)
            for call, share in zip(one.calls, shared, strict=True)
            if share or credit.kind in ("all", "process")  # a call without credit does not count in the token mean either
        ]
    return rows


def statistics(played: Sequence[Played], batch: Batch) -> dict[str, float]:
    """The step's row as far as episodes tell it; names of tracking.names."""
    rewards = [one.reward for one in played if one.reward is not None]
    calls = [call for one in played for call in one.calls]
    row: dict[str, float] = {
        "training/n_rollouts": len(played),
        "training/n_failed_rollouts": len(played) - len(rewards),
        "training/n_turns": len(calls),
        "training/n_groups": batch.groups,
        "training/n_zero_adv_groups": batch.uniform,
        "training/n_sample_trained": sum(len(rows) for rows in batch.mini_batches),
    }
    if rewards:
        row[REWARD] = sum(rewards) / len(rewards)
    row |= part_metrics([one.parts for one in played if one.parts], "training")
    if calls:
        row["prompt_length/mean"] = sum(len(call.prompt) for call in calls) / len(calls)
        row["response_length/mean"] = sum(len(call.response) for call in calls) / len(calls)
    return row
