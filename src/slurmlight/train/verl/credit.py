"""Credit of single calls after Agent-Lightning made its rows: it gives every row of an episode the episode's advantage.

``mark`` weighs the tokens of a batch while its rows are still in the order of the calls; ``apply`` multiplies the advantages by
these weights, after they were computed over episodes. Calls are found in the response mask: what was said between two of them
in one row is masked out. A call without credit still counts in its episode's token mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from slurmlight.presets.learning import CreditSection
from slurmlight.train.credit import shares

KEY = "call_credit"


def token_weights(mask: torch.Tensor, episodes: Sequence[Hashable], credit: CreditSection) -> torch.Tensor:
    """The share of the episode's advantage of each token, float [rows, tokens]; 0 where ``mask`` [rows, tokens] is 0.

    ``episodes`` names the episode of each row; rows of one episode are in the order of its calls.
    """
    numbers, calls = _numbered(mask.bool(), episodes)
    weights = torch.zeros(mask.shape)
    for row, episode in enumerate(episodes):
        table = torch.tensor([0.0, *shares(calls[episode], credit)])
        weights[row] = table[numbers[row]]
    return weights


def _numbered(mask: torch.Tensor, episodes: Sequence[Hashable]) -> tuple[torch.Tensor, dict[Hashable, int]]:
    """The call of each token, counted from 1 through the rows of its episode (0: masked); how many each episode has."""
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    within = (mask & ~before).cumsum(dim=1)
    calls: dict[Hashable, int] = {}
    numbers = torch.zeros_like(within)
    for row, episode in enumerate(episodes):
        begun = calls.get(episode, 0)
        numbers[row] = torch.where(mask[row], within[row] + begun, 0)
        calls[episode] = begun + int(within[row].amax()) if within.shape[1] else begun
    return numbers, calls


def mark(batch: Any, credit: CreditSection) -> None:
    """Weigh the tokens of a fresh batch of Agent-Lightning's rows (a DataProto)."""
    if credit.kind == "all":
        return
    rows = batch.batch
    mask = rows["response_mask"] if "response_mask" in rows else rows["attention_mask"][:, -rows["responses"].shape[1] :]
    rows[KEY] = token_weights(mask.cpu(), list(batch.non_tensor_batch["rollout_id_list"]), credit)


def apply(batch: Any) -> None:
    """Give each call its share of the advantages; nothing where ``mark`` made no weights."""
    if KEY in batch.batch:
        batch.batch["advantages"] = batch.batch["advantages"] * batch.batch.pop(KEY).to(batch.batch["advantages"])
