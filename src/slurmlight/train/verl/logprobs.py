"""Log-probabilities of chosen tokens from logits, in a handful of kernels and without a second array of the logits' size.

Where flash-attn is not installed, verl 0.9 takes a loop over the tokens in Python: on an H200 the update of a 135M model spent
nearly all of its 15 s a step there. ``install`` puts this in its place; with flash-attn verl goes on using that one's kernel.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch

CHUNK = 1 << 27  # logits that are held in float32 at a time: 512 MB


class _LogProbs(torch.autograd.Function):
    """log p(label) = logit(label) - logsumexp(logits); its gradient g * (onehot(label) - p), computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        normaliser = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        chosen = torch.empty_like(normaliser)
        for rows in _chunks(logits):
            part = logits[rows].float()
            normaliser[rows] = part.logsumexp(-1)
            chosen[rows] = part.gather(-1, labels[rows, None]).squeeze(-1)
        ctx.save_for_backward(logits, labels, normaliser)
        return chosen - normaliser

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, normaliser = ctx.saved_tensors
        (gradient,) = gradients
        found = torch.empty_like(logits)
        for rows in _chunks(logits):
            weight = gradient[rows, None].float()
            part = (logits[rows].float() - normaliser[rows, None]).exp_().mul_(-weight)
            found[rows] = part.scatter_add_(-1, labels[rows, None], weight).to(logits.dtype)
        return found, None


def logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """float32 [...]: natural log-probability of ``labels`` [...] under ``logits`` [..., vocabulary], of any float type."""
    flat: Any = _LogProbs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return flat.view(labels.shape)


def install() -> None:
    """In this process, for verl."""
    from verl.utils import torch_functional

    torch_functional.logprobs_from_logits_v2 = logprobs


def _chunks(logits: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
