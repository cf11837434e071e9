"""Credit of single calls on arrays shaped as Agent-Lightning's rows, by hand-computed values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slurmlight.presets.learning import CreditSection
from slurmlight.train.verl import credit

# Episode a: two calls in one row, with two tokens of feedback between them, and a third call in a row of its own.
# Episode b: one call. The rows of the two lie in any order, those of one in the order of its calls.
MASK = torch.tensor(
    [
        [1, 1, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
    ]
)
EPISODES = ["a", "b", "a"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all", [[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]),
        ("last", [[0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]),
        ("discounted", [[0.25, 0.25, 0, 0, 0.5, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]),
    ],
)
def test_tokens_have_the_share_of_their_call(kind: Any, expected: list[list[float]]) -> None:
    weights = credit.token_weights(MASK, EPISODES, CreditSection(kind=kind, gamma=0.5))
    assert weights.tolist() == expected


def batch(**more: torch.Tensor) -> Any:
    tensors = {"response_mask": MASK, "advantages": torch.tensor([[2.0], [-1.0], [2.0]]) * MASK, **more}
    return SimpleNamespace(batch=tensors, non_tensor_batch={"rollout_id_list": np.array(EPISODES)})


def test_weights_follow_their_rows_and_are_gone_after_use() -> None:
    rows = batch()
    credit.mark(rows, CreditSection(kind="last"))
    order = [2, 0, 1]  # what balancing over GPUs does
    rows.batch = {name: tensor[order] for name, tensor in rows.batch.items()}
    credit.apply(rows)
    assert rows.batch["advantages"].tolist() == [[2, 2, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0]]
    assert set(rows.batch) == {"response_mask", "advantages"}


def test_by_default_nothing_is_touched() -> None:
    rows = batch()
    before = rows.batch["advantages"]
    credit.mark(rows, CreditSection())
    credit.apply(rows)
    assert rows.batch["advantages"] is before and set(rows.batch) == {"response_mask", "advantages"}


def test_rows_of_one_call_each_have_no_mask_of_their_own() -> None:
    """Agent-Lightning's transition level: prompts [rows, 2] and responses [rows, 6] in one attention mask."""
    ones = torch.ones(3, 2, dtype=torch.long)
    given = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    rows = batch(attention_mask=torch.cat([ones, given], dim=1), responses=given)
    del rows.batch["response_mask"]
    credit.mark(rows, CreditSection(kind="discounted", gamma=0.5))
    assert rows.batch[credit.KEY].tolist() == [[0.5, 0.5, 0.5, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
