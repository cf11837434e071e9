"""From played episodes to what the update learns from: advantages, mini batches, and a step's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmlight.presets import Preset
from slurmlight.tracking.names import REWARD
from slurmlight.train.embedded.actor import Row
from slurmlight.train.embedded.grpo import advantages
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
    by_std = preset.algorithm.norm_adv_by_std_in_grpo
    groups = [_rows(task, played[start : start + n], by_std) for task, start in enumerate(range(0, len(played), n))]
    mini_batches = [[row for group in groups[start : start + size] for row in group] for start in range(0, len(groups), size)]
    return Batch(mini_batches, len(groups), sum(not group for group in groups))


def _rows(task: int, group: Sequence[Played], by_std: bool) -> list[Row]:
    """Every learning call with its episode's advantage; none where the group has nothing to compare."""
    scored = [(sample, one, one.reward) for sample, one in enumerate(group) if one.reward is not None]
    values = advantages([reward for _, _, reward in scored], by_std)
    if values is None:
        return []
    return [
        Row(task, sample, call.prompt, call.response, call.logprobs, value)
        for (sample, one, _), value in zip(scored, values, strict=True)
        for call in one.calls
    ]


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
    if calls:
        row["prompt_length/mean"] = sum(len(call.prompt) for call in calls) / len(calls)
        row["response_length/mean"] = sum(len(call.response) for call in calls) / len(calls)
    return row
