"""The policy being trained: its model, its optimiser, one GRPO update, and its part of a checkpoint.

Everything runs in one process on one CPU with deterministic algorithms; rows come sorted, so that an update depends on
what was sampled and not on which episode came back first.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.presets.learning import StabilitySection
from slurmlight.train.alarms import NOT_A_NUMBER
from slurmlight.train.checkpoints import shard_name
from slurmlight.train.embedded.grpo import Loss, Tokens, policy_loss
from slurmlight.train.stability import next_kl_coef

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, order=True)
class Row:
    """One learning call of an episode. The order of the fields is the order of training."""

    task: int
    sample: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float


class Actor:
    def __init__(self, preset: Preset) -> None:
        """Loads ``model.path``. Raises UserError where it is no Qwen3 model folder."""
        self.settings = preset.actor_rollout_ref.actor
        self.lowest_kl_coef = self.settings.kl_loss_coef
        self.temperature = preset.actor_rollout_ref.rollout.temperature
        self.folder = Path(preset.actor_rollout_ref.model.path)
        self.model = load_model(self.folder)
        self.reference = load_model(self.folder).requires_grad_(False) if self.settings.use_kl_loss else None
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        optim = self.settings.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        self.updates = 0  # optimiser steps done
        self.lr_scale = 1.0  # lowered by a fallback
        if preset.actor_rollout_ref.model.enable_gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def update(self, mini_batches: Sequence[Sequence[Row]]) -> dict[str, float]:
        """``ppo_epochs`` passes over the mini batches, an optimiser step each; metrics under verl's names.

        A mini batch without rows (every group had equal rewards) makes no step.
        """
        losses: list[Loss] = []
        norms: list[float] = []
        tokens = 0
        for _ in range(self.settings.ppo_epochs):
            for rows in filter(None, mini_batches):
                tokens += sum(len(row.response) for row in rows)
                losses += self._accumulate(sorted(rows))
                norms.append(self._step())
        if not norms:
            return {}
        finite = [norm for norm in norms if isfinite(norm)]
        return {
            "actor/pg_loss": sum(loss.policy for loss in losses) / tokens,
            "actor/ppo_kl": sum(loss.kl for loss in losses) / tokens,
            "actor/pg_clipfrac": sum(loss.clipped_high for loss in losses) / tokens,
            "actor/pg_clipfrac_lower": sum(loss.clipped_low for loss in losses) / tokens,
            "actor/entropy": sum(loss.entropy for loss in losses) / tokens,
            **(self._reference_metrics(losses, tokens) if self.reference else {}),
            "actor/grad_norm": sum(finite) / max(1, len(finite)),
            **({NOT_A_NUMBER: len(norms) - len(finite)} if len(finite) < len(norms) else {}),
            "actor/lr": self.optimizer.param_groups[0]["lr"],
        }

    def _reference_metrics(self, losses: Sequence[Loss], tokens: int) -> dict[str, float]:
        return {
            "actor/kl_loss": sum(loss.reference_kl for loss in losses) / tokens,
            "actor/kl_coef": self.settings.kl_loss_coef,
        }

    def adapt_kl(self, row: Mapping[str, float], steady: StabilitySection) -> None:
        """Move the coefficient of the KL loss towards its target, by the KL in the row of a step that was just done."""
        if steady.target_kl and (kl := row.get("actor/kl_loss")) is not None:
            self._set_kl_coef(next_kl_coef(self.settings.kl_loss_coef, kl, self.lowest_kl_coef, steady))

    def _set_kl_coef(self, coef: float) -> None:
        self.settings = structs.replace(self.settings, kl_loss_coef=coef)

    def _accumulate(self, rows: Sequence[Row]) -> Iterator[Loss]:
        """Gradients of the token-mean loss over ``rows``, micro batch by micro batch."""
        self.optimizer.zero_grad()
        total = sum(len(row.response) for row in rows)
        size = self.settings.ppo_micro_batch_size_per_gpu
        for start in range(0, len(rows), size):
            loss = policy_loss(self._tokens(rows[start : start + size]), self.settings)
            (loss.total / total).backward()
            yield loss

    def _tokens(self, rows: Sequence[Row]) -> Tokens:
        logprobs, entropy = response_logprobs(self.model, rows, self.temperature)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = response_logprobs(self.reference, rows, self.temperature)
        old = torch.tensor([value for row in rows for value in row.logprobs])
        advantages = torch.tensor([row.advantage for row in rows for _ in row.response])
        return Tokens(logprobs, entropy, old, advantages, reference)

    def _step(self) -> float:
        """One step of the optimiser; none where the gradient is no number. The gradient's norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip).item()
        if not isfinite(norm):
            return norm
        self.updates += 1
        optim = self.settings.optim
        for group in self.optimizer.param_groups:  # from the first step on: verl's warm-up makes one of rate 0 first
            group["lr"] = optim.lr * self.lr_scale * min(1.0, self.updates / max(1, optim.lr_warmup_steps))
        self.optimizer.step()
        return norm

    def export_model(self, folder: Path) -> None:
        """Model and tokenizer in Hugging Face form. Raises OSError."""
        disable_progress_bar()
        with _os_errors():
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def export(self, folder: Path) -> None:
        """The weights alone, for the policy server. Raises OSError."""
        weights = {name: tensor for name, tensor in self.model.state_dict().items() if not self._is_tied(name)}
        with _os_errors():
            save_file(weights, folder / WEIGHTS)

    def save(self, folder: Path) -> None:
        """verl's shards of one process in ``folder``, and the model in Hugging Face form in ``folder/huggingface``."""
        extra = {"updates": self.updates, "rng": torch.get_rng_state(), "kl_coef": self.settings.kl_loss_coef}
        torch.save(self.model.state_dict(), folder / shard_name("model", 1, 0))
        torch.save(self.optimizer.state_dict(), folder / shard_name("optim", 1, 0))
        torch.save(extra, folder / shard_name("extra_state", 1, 0))
        self.export_model(folder / "huggingface")

    def load(self, folder: Path) -> None:
        """What ``save`` wrote. Raises UserError where it belongs to another model."""
        model, optim, extra = (_read(folder / shard_name(part, 1, 0)) for part in ("model", "optim", "extra_state"))
        try:
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optim)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"the checkpoint in {folder} is of another model than {self.folder} ({str(error).splitlines()[0]})",
                "start a new run, or put the model back",
            ) from None
        self.updates = extra["updates"]
        self._set_kl_coef(extra.get("kl_coef", self.lowest_kl_coef))  # absent in checkpoints of before it could move
        torch.set_rng_state(extra["rng"])

    def _is_tied(self, name: str) -> bool:
        return name == "lm_head.weight" and bool(self.model.config.tie_word_embeddings)


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """A float32 model in fresh memory (files are mapped at any alignment, and kernels may choose by it).

    Raises UserError where ``folder`` holds no whole Qwen3 model.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        model = Qwen3ForCausalLM(config).float()
        weights = load_file(folder / WEIGHTS)
        if config.tie_word_embeddings:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        model.load_state_dict(weights)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{folder} holds no whole Qwen3 model ({str(error).splitlines()[0]})", "give the folder of a saved model"
        ) from None
    return model.train()


def response_logprobs(model: Qwen3ForCausalLM, rows: Sequence[Row], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each response token of ``rows``, one after the other, and the entropy at its place: both [tokens].

    Logits are divided by ``temperature``, as they were in sampling. Right padding: the causal mask hides it.
    """
    longest = max(len(row.prompt) + len(row.response) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    trained = torch.zeros(len(rows), longest, dtype=torch.bool)
    for place, row in enumerate(rows):
        length = len(row.prompt) + len(row.response)
        ids[place, :length] = torch.tensor(row.prompt + row.response)
        trained[place, len(row.prompt) : length] = True
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][trained[:, 1:]]
    logprobs = (model.lm_head(hidden) / temperature).log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(-1, ids[:, 1:][trained[:, 1:]][:, None])[:, 0], entropy


@contextmanager
def _os_errors() -> Iterator[None]:
    """safetensors tells of a full disk by an error of its own: "... No space left on device (os error 28)"."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error


def _read(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})", "remove that checkpoint; an older one is taken") from None
