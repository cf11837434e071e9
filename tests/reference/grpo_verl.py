"""GRPO numbers by verl itself:  python tests/reference/grpo_verl.py > tests/reference/grpo.json  (where verl 0.9.1 is installed)

The batch is made by ``batch()`` without torch, so that every version of everything sees the same one.
"""

from __future__ import annotations

import json
import random
from typing import Any

GROUP, GROUPS, LENGTH = 4, 3, 7
CLIP = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3}


def batch() -> dict[str, Any]:
    """Twelve rows in three groups, right-padded responses, ratios on both sides of every clip (the dual one too)."""
    rng = random.Random(7)
    rows = GROUP * GROUPS
    old = [[-rng.uniform(0.1, 3.0) for _ in range(LENGTH)] for _ in range(rows)]
    return {
        "rewards": [rng.choice([0.0, 0.25, 1.0]) for _ in range(rows)],
        "groups": [row // GROUP for row in range(rows)],
        "old_log_prob": old,
        "log_prob": [[value + rng.uniform(-0.6, 0.6) + (rng.random() < 0.1) * 2.0 for value in row] for row in old],
        "ref_log_prob": [[value + rng.uniform(-0.4, 0.4) for value in row] for row in old],
        "lengths": [rng.randint(1, LENGTH) for _ in range(rows)],
    }


def by_verl() -> dict[str, Any]:
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla, kl_penalty_forward
    from verl.workers.config import ActorConfig

    given = batch()
    mask = torch.tensor([[float(column < length) for column in range(LENGTH)] for length in given["lengths"]])
    scores = torch.zeros_like(mask)
    for row, length in enumerate(given["lengths"]):
        scores[row, length - 1] = given["rewards"][row]
    index = np.array(given["groups"], dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(scores.clone(), mask, index)
    centred, _ = compute_grpo_outcome_advantage(scores.clone(), mask, index, norm_adv_by_std_in_grpo=False)
    old, new, reference = (torch.tensor(given[name]) for name in ("old_log_prob", "log_prob", "ref_log_prob"))
    new.requires_grad_()
    config = ActorConfig(strategy="fsdp", rollout_n=GROUP, ppo_micro_batch_size_per_gpu=1, **CLIP)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(mask.sum()))
    loss, metrics = compute_policy_loss_vanilla(old, new, advantages, mask, "token-mean", config)
    loss.backward()
    kl = kl_penalty_forward(new.detach(), reference, "low_var_kl")
    return {
        "advantages": advantages[:, 0].tolist(),
        "centred": centred[:, 0].tolist(),
        "loss": loss.item(),
        "gradient": new.grad.tolist(),
        "clipfrac": metrics["actor/pg_clipfrac"],
        "clipfrac_lower": metrics["actor/pg_clipfrac_lower"],
        "ppo_kl": metrics["actor/ppo_kl"],
        "low_var_kl": ((kl * mask).sum() / mask.sum()).item(),
    }


if __name__ == "__main__":
    print("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in by_verl().items()) + "\n}")
