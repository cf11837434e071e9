"""The names of a step's metrics in metrics.jsonl, the same in every engine: verl's and Agent-Lightning's own.

A row is one JSON object a step, ``{"step": N, name: number, ...}``, validation of that step included (a second row of the
same step would replace the first). Row 0 is the validation before training. What a name means is in ``ABOUT``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

STEP = "step"
REWARD = "training/reward"
VALIDATION = "val/reward"
SECONDS = "timing_s/step"

ABOUT = {
    STEP: "training step, from 1; 0 is the validation before training",
    REWARD: "mean reward of the step's episodes, sampled at rollout.temperature [Agent-Lightning]",
    VALIDATION: "plain execution match on the validation file, greedy, whatever training is paid by [Agent-Lightning, kit]",
    "val/shaped_reward": "what a composed reward would have paid there; its parts are val/reward/NAME [kit]",
    "val/n_rollouts": "episodes of that validation [Agent-Lightning]",
    "val/n_failed_rollouts": "of these, failed by infrastructure [kit]",
    "training/execution_match": "plain accuracy of the step's episodes where the reward is composed [kit]",
    "training/reward/NAME": "mean of that part of a composed reward, before its weight [kit]",
    "training/alarms": "alarms of the step (docs/learning.md) [kit]",
    "training/not_a_number": "updates left out because a gradient was no number [kit, embedded]",
    "curriculum/phase": "phase of the curriculum, from 1 [kit, embedded]",
    "curriculum/tasks": "tasks of that phase [kit, embedded]",
    "training/epoch": "pass over the training file [verl]",
    "training/n_rollouts": "episodes of the step [Agent-Lightning]",
    "training/n_failed_rollouts": "of these, failed by infrastructure: no reward, not trained on [kit]",
    "training/n_turns": "model calls of the step's episodes [Agent-Lightning]",
    "training/n_groups": "GRPO groups of the step [Agent-Lightning]",
    "training/n_zero_adv_groups": "groups whose rewards are all equal: nothing to learn, dropped [Agent-Lightning]",
    "training/n_sample_trained": "rows (calls) the update learned from [Agent-Lightning]",
    "actor/pg_loss": "clipped policy-gradient loss, mean over tokens [verl]",
    "actor/pg_clipfrac": "share of tokens whose ratio was clipped from above [verl]",
    "actor/pg_clipfrac_lower": "share of tokens whose ratio was clipped from below [verl]",
    "actor/ppo_kl": "mean of old log-prob minus new log-prob, nats a token [verl]",
    "actor/entropy": "mean entropy of the policy, nats a token [verl]",
    "actor/kl_loss": "KL against the reference where actor.use_kl_loss is on, nats a token [verl]",
    "actor/kl_coef": "weight of that KL; moves where stability.target_kl is on [verl]",
    "actor/grad_norm": "gradient norm before clipping [verl]",
    "actor/lr": "learning rate [verl]",
    "prompt_length/mean": "tokens of a prompt [verl]",
    "response_length/mean": "tokens of a completion [verl]",
    SECONDS: "seconds of the whole step, its validation and the save before it included [verl]",
    "timing_s/gen": "seconds of the rollouts, from first claim to last reward [verl]",
    "timing_s/adv": "seconds of the advantages [verl]",
    "timing_s/update_actor": "seconds of the update [verl]",
    "timing_s/testing": "seconds of the validation [verl]",
    "timing_s/save_checkpoint": "seconds of the save since the row before: a step is saved after its row [verl]",
    "timing_s/update_weights": "seconds to hand the new weights to the rollout server [verl]",
    "cpu_s/policy_server": "CPU seconds of the policy server during the rollouts [kit, embedded]",
    "cpu_s/generation": "of these, prefill and decoding [kit, embedded]",
    "cpu_s/gateway": "CPU seconds of the gateway during the rollouts [kit, embedded]",
    "cpu_s/runners": "CPU seconds of the runners during the rollouts [kit, embedded]",
    "cpu_s/trainer": "CPU seconds of the trainer during the rollouts [kit, embedded]",
}


def number(row: Mapping[str, Any], name: str) -> float | None:
    """The finite number under ``name``; None where there is none."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def series(rows: Iterable[Mapping[str, Any]], name: str) -> dict[int, float]:
    """``name`` by step, from ``RunFolder.metric_rows()``; ``series(rows, VALIDATION)`` are the scores retention asks for."""
    return {row[STEP]: value for row in rows if (value := number(row, name)) is not None}
