"""A small Qwen3 decoder for one CPU: float32, preallocated KV cache, and a row's bits that do not depend on its companions.

Every forward pass has a fixed shape. A prompt is prefilled alone, padded to its own length class; a decoding step always
runs all slots of the row's length class, idle ones included. No shape, no summation order and no kernel choice can
therefore depend on who else is being served or who came first (tests/test_train_decoder.py proves it bit by bit).

Formulas: transformers' Qwen3ForCausalLM (RMSNorm on queries and keys, rotary embedding by halves, SwiGLU, grouped heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import Qwen3Config

from slurmlight.errors import UserError

SMALLEST_CLASS = 128  # tokens; length classes are this times a power of two


@dataclass(frozen=True)
class Shape:
    """What the decoder needs of a Qwen3Config."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def of(cls, config: Qwen3Config) -> Shape:
        """Raises UserError for a Qwen3 variant this decoder does not compute (scaled rotary embedding, biases, windows)."""
        rope = config.rope_parameters or {}
        plain = rope.get("rope_type", "default") == "default" and not config.attention_bias and not config.use_sliding_window
        if config.model_type != "qwen3" or config.hidden_act != "silu" or not plain:
            raise UserError(
                f"the embedded engine decodes plain Qwen3 models only, not this {config.model_type}", "use a verl preset"
            )
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            config.rms_norm_eps,
            rope["rope_theta"],
        )


@dataclass(frozen=True)
class Layer:
    """Weights of a layer: projections that read the same input are fused, and what RMSNorm multiplies by is folded in.

    RMSNorm's sqrt(size) goes into the next weight too, the attention's 1/sqrt(head_dim) into the queries' norm.
    """

    qkv: torch.Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]
    qk_norm: torch.Tensor  # [heads + kv_heads, head_dim]
    out: torch.Tensor
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor


@dataclass(frozen=True)
class Weights:
    embedding: torch.Tensor  # [vocabulary, hidden]
    layers: tuple[Layer, ...]
    head: torch.Tensor  # [vocabulary, hidden], the last RMSNorm's weight folded in


def load_weights(folder: Path, shape: Shape) -> Weights:
    """The weights in ``folder/model.safetensors`` in fresh float32 memory: the same alignment, hence bits, at every load."""
    try:
        raw = {name: tensor.float().clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        layers = tuple(_layer(raw, f"model.layers.{index}", shape) for index in range(shape.layers))
        embedding = raw["model.embed_tokens.weight"]
        head = raw.get("lm_head.weight", embedding) * (raw["model.norm.weight"] * shape.hidden**0.5)
        return Weights(embedding, layers, head)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{folder} holds no whole Qwen3 model ({error})", "give the folder of a saved model") from None


def _layer(raw: dict[str, torch.Tensor], name: str, shape: Shape) -> Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    q_norm, k_norm = raw[f"{attention}.q_norm.weight"], raw[f"{attention}.k_norm.weight"] * shape.head_dim**0.5
    scale = shape.hidden**0.5
    return Layer(
        torch.cat([raw[f"{attention}.{part}_proj.weight"] for part in "qkv"]) * (raw[f"{name}.input_layernorm.weight"] * scale),
        torch.cat([q_norm.expand(shape.heads, -1), k_norm.expand(shape.kv_heads, -1)]),
        raw[f"{attention}.o_proj.weight"],
        torch.cat([raw[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")])
        * (raw[f"{name}.post_attention_layernorm.weight"] * scale),
        raw[f"{mlp}.down_proj.weight"],
    )


class Decoder:
    """Prefill and decoding steps of one model. ``max_length`` bounds prompt plus completion, in tokens."""

    def __init__(self, config: Qwen3Config, weights: Weights, max_length: int) -> None:
        self.shape = Shape.of(config)
        self.weights = weights
        self.max_length = max_length
        self.largest_class = length_class(max_length)
        frequency = self.shape.rope_theta ** -(torch.arange(0, self.shape.head_dim, 2).float() / self.shape.head_dim)
        angles = torch.outer(torch.arange(self.largest_class).float(), frequency).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def new_cache(self, slots: int, size: int) -> list[torch.Tensor]:
        """An empty cache: one [slots, 2 kv_heads, class, head_dim] a layer, keys before values."""
        return [torch.zeros(slots, 2 * self.shape.kv_heads, size, self.shape.head_dim) for _ in range(self.shape.layers)]

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The cache rows [2 kv_heads, class, head_dim] of each layer and the next-token logits [vocabulary] of a prompt."""
        length, size = len(tokens), length_class(len(tokens))
        padded = torch.zeros(size, dtype=torch.long)
        padded[:length] = torch.tensor(tokens)
        rows = []
        x = self.weights.embedding[padded]
        for layer in self.weights.layers:
            q, kv = self._project(layer, x, self.cos[:size], self.sin[:size])
            rows.append(kv.transpose(0, 1).contiguous())
            keys, values = rows[-1].chunk(2)
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1), keys, values, is_causal=True, scale=1.0, enable_gqa=True
            )
            x = self._finish(layer, x, attended.transpose(0, 1))
        return rows, self._logits(x)[length - 1]

    @torch.inference_mode()
    def step(self, cache: list[torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [slots, vocabulary] after ``tokens`` [slots] at ``positions`` [slots], which it writes into ``cache``."""
        slots, kv_heads, size = len(tokens), self.shape.kv_heads, cache[0].shape[2]
        every = torch.arange(slots)
        future = torch.where(torch.arange(size) <= positions[:, None], 0.0, float("-inf"))[:, None, None, :]
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.weights.embedding[tokens]
        for layer, rows in zip(self.weights.layers, cache, strict=True):
            q, kv = self._project(layer, x, cos, sin)
            rows[every, :, positions] = kv
            grouped = q.reshape(slots, kv_heads, -1, self.shape.head_dim)  # query heads by the key head they share
            scores = torch.matmul(grouped, rows[:, :kv_heads].transpose(2, 3)) + future
            x = self._finish(layer, x, torch.matmul(scores.softmax(dim=-1), rows[:, kv_heads:]))
        return self._logits(x)

    def _project(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [rows, heads, head_dim] and keys with values [rows, 2 kv_heads, head_dim] of ``x`` [rows, hidden]."""
        heads, kv_heads, dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        fused = F.linear(self._norm(x), layer.qkv).view(len(x), heads + 2 * kv_heads, dim)
        qk = self._norm(fused[:, : heads + kv_heads]) * layer.qk_norm
        turned = torch.cat([-qk[..., dim // 2 :], qk[..., : dim // 2]], dim=-1)
        qk = qk * cos[:, None] + turned * sin[:, None]
        return qk[:, :heads], torch.cat([qk[:, heads:], fused[:, heads + kv_heads :]], dim=1)

    def _finish(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + F.linear(attended.reshape(len(x), -1), layer.out)
        gate, up = F.linear(self._norm(x), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm without its factor sqrt(size), which the weights hold."""
        return x * (x.square().sum(-1, keepdim=True) + self.shape.eps * x.shape[-1]).rsqrt()

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(x), self.weights.head)


def length_class(tokens: int) -> int:
    """The padded length of a row of so many tokens: a function of the row alone."""
    size = SMALLEST_CLASS
    while size < tokens:
        size *= 2
    return size
