"""What verl wants of logits, log-probabilities of chosen tokens and entropies, in a handful of kernels and little memory.

Where flash-attn is not installed, verl 0.9 takes log-probabilities in a Python loop over the tokens (on an H200, nearly all of
the 15 s that a step's update of a 135M model took), and keeps several arrays of the logits' size for the entropy's gradient,
which nobody asks for unless ``actor.entropy_coeff`` is set. ``install`` puts these functions there; with flash-attn verl goes
on as it was.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

CHUNK = 1 << 25  # logits that are held in float32 at a time: 128 MB


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
        weight = gradients[0][:, None].float()

        def gradient(part: torch.Tensor, rows: slice) -> torch.Tensor:
            shares = (part - normaliser[rows, None]).exp_().mul_(-weight[rows])
            return shares.scatter_add_(-1, labels[rows, None], weight[rows])

        return _by_chunks(logits, gradient), None


class _Entropy(torch.autograd.Function):
    """H = -sum(p log p); its gradient -g p (log p + H), computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        normaliser = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(normaliser)
        for rows in _chunks(logits):
            part = logits[rows].float()
            normaliser[rows] = part.logsumexp(-1)
            logs = part - normaliser[rows, None]
            entropy[rows] = -(logs.exp() * logs).sum(-1)  # logsumexp(z) - sum(p z) would lose small ones
        ctx.save_for_backward(logits, normaliser, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        logits, normaliser, entropy = ctx.saved_tensors
        weight = gradients[0][:, None].float()

        def gradient(part: torch.Tensor, rows: slice) -> torch.Tensor:
            logs = part - normaliser[rows, None]
            return logs.exp().mul_(logs + entropy[rows, None]).mul_(-weight[rows])

        return _by_chunks(logits, gradient)


def logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """float32 [...]: natural log-probability of ``labels`` [...] under ``logits`` [..., vocabulary], of any float type."""
    flat: Any = _LogProbs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return flat.view(labels.shape)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """float32 [...]: entropy in nats of the distributions that ``logits`` [..., vocabulary] stand for."""
    flat: Any = _Entropy.apply(logits.reshape(-1, logits.shape[-1]))
    return flat.view(logits.shape[:-1])


def install() -> None:
    """In this process, for verl."""
    if find_spec("flash_attn") is not None:
        return
    from verl.utils import torch_functional

    torch_functional.logprobs_from_logits_v2 = logprobs
    torch_functional.entropy_from_logits = entropy


def _chunks(logits: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _by_chunks(logits: torch.Tensor, function: Callable[[torch.Tensor, slice], torch.Tensor]) -> torch.Tensor:
    """``function`` of float32 chunks of ``logits`` and their rows, put together in the type of ``logits``."""
    found = torch.empty_like(logits)
    for rows in _chunks(logits):
        found[rows] = function(logits[rows].float(), rows).to(logits.dtype)
    return found
