"""The embedded engine and the verl engine make the same rows and advantages of the same episodes (mark ``stack``)."""

from __future__ import annotations

import pytest

from slurmlight.train.embedded.grpo import advantages
from slurmlight.train.rollouts.play import Job, read_events

pytestmark = pytest.mark.stack
pytest.importorskip("verl", reason="verl is not installed (requirements-stack.lock)")

# reward, then the calls: prompt ids, response ids. Two tasks with four episodes each; one wrote twice, one group is uniform.
GROUPS = [
    [(1.0, [([1, 2, 3], [9, 8])]), (0.0, [([1, 2, 3], [7]), ([5, 5, 6, 6], [4, 4])]), (0.0, [([1, 2, 3], [6, 6])]), (1.0, [([1, 2, 3], [9])])],
    [(1.0, [([2, 2], [3, 3, 3])])] * 4,
]  # fmt: skip


def events(reward: float, calls: list[tuple[list[int], list[int]]]) -> list[dict]:
    """As the gateway gives them, format=triplet."""
    requests = [
        {
            "event_type": "model_request",
            "data": {
                "status": "ok",
                "http_status": 200,
                "prompt_token_ids": prompt,
                "response_token_ids": response,
                "response_log_probs": [-0.5] * len(response),
            },
        }
        for prompt, response in calls
    ]
    return [*requests, {"event_type": "reward", "data": {"value": reward}}]


def embedded_rows() -> list[tuple]:
    rows = []
    for group in GROUPS:
        played = [read_events(Job("x", {}, learns=True), events(reward, calls)) for reward, calls in group]
        values = advantages([one.reward for one in played if one.reward is not None]) or [0.0] * len(group)
        rows += [(call.prompt, call.response, value) for one, value in zip(played, values, strict=True) for call in one.calls]
    return rows


def verl_rows() -> list[tuple]:
    import torch
    from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
    from agentlightning.verl.rollout_adapter import RolloutAdapter
    from agentlightning.verl.rollout_level_advantage import compute_rollout_level_advantage
    from verl.trainer.ppo.ray_trainer import compute_response_mask

    done = []
    for task, group in enumerate(GROUPS):
        for sample, (reward, calls) in enumerate(group):
            triplets = [
                Triplet(prompt={"token_ids": prompt}, response={"token_ids": response, "log_probs": [-0.5] * len(response)})
                for prompt, response in calls
            ]
            done.append(
                CompletedRollout(
                    rollout_id=f"{task}-{sample}",
                    data_id=str(task),
                    step=1,
                    sample_idx_in_step=task,
                    enqueue_time=0.0,
                    final_reward=reward,
                    triplets=triplets,
                )
            )
    adapter = RolloutAdapter(
        max_prompt_length=8,
        max_response_length=8,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="transition",
    )
    batch, _ = adapter.get_train_data_batch(done, global_steps=1)
    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["data_id_list"]
    batch.batch["response_mask"] = compute_response_mask(batch)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch, _ = compute_rollout_level_advantage(batch, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=4)
    rows = []
    for row in range(len(batch)):
        mask = batch.batch["response_mask"][row].bool()
        width = batch.batch["prompts"].shape[1]
        prompt = batch.batch["prompts"][row][batch.batch["attention_mask"][row][:width].bool()]
        response = batch.batch["responses"][row][mask]
        rows.append((tuple(prompt.tolist()), tuple(response.tolist()), batch.batch["advantages"][row][mask][0].item()))
    return rows


def test_rows_and_advantages_are_the_same() -> None:
    ours, theirs = sorted(embedded_rows()), sorted(verl_rows())
    assert [row[:2] for row in ours] == [row[:2] for row in theirs]
    # Agent-Lightning keeps scores, and so the advantages made of them, as bfloat16: 8 bits of mantissa
    assert [row[2] for row in ours] == pytest.approx([row[2] for row in theirs], rel=2**-8)
