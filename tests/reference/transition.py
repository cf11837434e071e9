"""Rows and advantages of the same episodes, by whichever stack is installed:

python -m tests.reference.transition > tests/reference/transition.json    (where the current stack is installed)

Transition level, one advantage a row: what both stacks can do. verl 0.9.1 with Agent-Lightning 1.0.2 made the file.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

# For each task its episodes: reward, then the calls: prompt ids, response ids. Episodes of several calls weigh more in their
# group; a prompt of nine tokens is longer than PROMPT and dropped before the advantages.
TASKS: list[list[tuple[float, list[tuple[list[int], list[int]]]]]] = [
    [
        (1.0, [([1, 2, 3], [9, 8])]),
        (0.0, [([1, 2, 3], [7]), ([5, 5, 6, 6], [4, 4])]),
        (0.0, [([1, 2, 3], [6, 6])]),
        (0.5, [([1, 2, 3], [9]), ([5, 6], [1]), ([7, 7], [2])]),
    ],
    [(1.0, [([2, 2], [3, 3, 3])])] * 4,
    [(1.0, [([4], [1])]), (0.0, [([4], [2]), ([4] * 5, [2])]), (0.0, [([4], [3])]), (0.25, [([4] * 9, [5]), ([4, 4], [5])])],
]
PROMPT, RESPONSE = 8, 8

Row = list[Any]  # prompt ids, response ids, advantage


def current() -> list[Row]:
    import torch
    from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
    from agentlightning.verl.rollout_adapter import RolloutAdapter

    done = [
        CompletedRollout(
            rollout_id=f"{task}-{sample}",
            data_id=str(task),
            step=1,
            sample_idx_in_step=task,
            enqueue_time=0.0,
            final_reward=reward,
            triplets=[
                Triplet(prompt={"token_ids": prompt}, response={"token_ids": response, "log_probs": [-0.5] * len(response)})
                for prompt, response in calls
            ],
        )
        for task, episodes in enumerate(TASKS)
        for sample, (reward, calls) in enumerate(episodes)
    ]
    adapter = RolloutAdapter(
        max_prompt_length=PROMPT,
        max_response_length=RESPONSE,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="transition",
    )
    batch, _ = adapter.get_train_data_batch(done, global_steps=1)
    return _advantages(batch[(~batch.batch["is_drop_mask"]).nonzero(as_tuple=True)[0]])


def seed() -> list[Row]:
    import torch
    from agentlightning.types import Triplet

    from slurmlight.train.seed.daemon import Daemon

    daemon = object.__new__(Daemon)  # its rows need no store, proxy or model
    played = {
        f"{task}-{sample}": SimpleNamespace(
            rollout_id=f"{task}-{sample}",
            final_reward=reward,
            triplets=[Triplet(prompt={"token_ids": one}, response={"token_ids": two}) for one, two in calls],
        )
        for task, episodes in enumerate(TASKS)
        for sample, (reward, calls) in enumerate(episodes)
    }
    daemon.__dict__ |= {
        "is_train": True,
        "failed": 0,
        "hooks": SimpleNamespace(beat=lambda *_: None),
        "mini_batch_size": 1,
        "pad_token_id": 0,
        "reward_fillna_value": 0.0,
        "trace_aggregator": {"level": "transition"},
        "_use_mrope": False,
        "_completed_rollouts_v0": played,
        "_total_tasks_queued": len(played),
        "_task_id_to_original_sample": {name: {"data_id": name.split("-")[0]} for name in played},
    }
    batch, _ = daemon.get_train_data_batch(PROMPT, RESPONSE, torch.device("cpu"), 1)
    return _advantages(batch)


def _advantages(batch: Any) -> list[Row]:
    from verl.trainer.ppo.ray_trainer import compute_advantage, compute_response_mask

    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["data_id_list"]
    batch.batch["response_mask"] = compute_response_mask(batch)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch = compute_advantage(batch, adv_estimator="grpo", num_repeat=4, norm_adv_by_std_in_grpo=True)
    found = []
    for row in range(len(batch)):
        mask = batch.batch["response_mask"][row].bool()
        prompt = batch.batch["prompts"][row][batch.batch["attention_mask"][row][:PROMPT].bool()]
        advantages = batch.batch["advantages"][row][mask].tolist()
        assert len(set(advantages)) == 1
        found.append([prompt.tolist(), batch.batch["responses"][row][mask].tolist(), advantages[0]])
    return sorted(found)


if __name__ == "__main__":
    rows = ",\n  ".join(map(json.dumps, current()))
    print(f'{{"verl": "{version("verl")}", "agentlightning": "{version("agentlightning")}", "rows": [\n  {rows}\n]}}')
