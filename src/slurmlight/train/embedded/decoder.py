"""A small Qwen3 decoder in numpy for one CPU: float32, a KV cache, and a row's bits that do not depend on its companions.

A prompt is prefilled alone. In a decoding step every row is multiplied with the weights by itself (a matrix-vector product
per row, not one matrix product whose kernel and summation order could depend on the number and the place of rows), and it
attends over its own length class, padded to a size that follows from the row alone. So no rounding can depend on who else
is being served or who came first (tests/test_train_decoder.py proves it bit by bit). For a model that fits in a CPU's cache
this is also the fastest of the forms tried: idle places cost nothing.

Formulas: transformers' Qwen3ForCausalLM (RMSNorm on queries and keys, rotary embedding by halves, SwiGLU, grouped heads).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from slurmlight.errors import UserError

type Array = np.ndarray[Any, Any]  # float32 everywhere in this module
SMALLEST_CLASS = 128  # tokens; length classes are this times a power of two


@dataclass(frozen=True)
class Shape:
    """What the decoder needs of a model's config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    max_positions: int


@dataclass(frozen=True)
class Layer:
    """Weights of a layer as [inputs, outputs]; projections of the same input are fused, RMSNorm's factors folded in.

    RMSNorm's sqrt(size) goes into the next weight too, the attention's 1/sqrt(head_dim) into the queries' norm.
    """

    qkv: Array  # [hidden, (heads + 2 kv_heads) * head_dim]
    qk_norm: Array  # [heads + kv_heads, head_dim]
    out: Array
    gate_up: Array  # [hidden, 2 * intermediate]
    down: Array


@dataclass(frozen=True)
class Weights:
    embedding: Array  # [vocabulary, hidden]
    layers: tuple[Layer, ...]
    head: Array  # [hidden, vocabulary], the last RMSNorm folded in


def read_shape(folder: Path) -> Shape:
    """Raises UserError where there is no config.json, or for a model this decoder does not compute."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no model folder ({error})", "give the folder of a saved Qwen3 model") from None
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    plain = rope.get("rope_type", "default") == "default" and not config.get("attention_bias")
    if config.get("model_type") != "qwen3" or not plain or config.get("use_sliding_window"):
        raise UserError(
            f"{folder} is no plain Qwen3 model, and the embedded engine decodes nothing else", "use a verl preset for it"
        )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or hidden // heads,
        eps=config["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        max_positions=config["max_position_embeddings"],
    )


def load_weights(folder: Path, shape: Shape) -> Weights:
    """Raises UserError where ``folder`` holds no whole model.safetensors in float32 or float16."""
    try:
        raw = {name: value.astype(np.float32) for name, value in load_file(folder / "model.safetensors").items()}
        layers = tuple(_layer(raw, f"model.layers.{index}", shape) for index in range(shape.layers))
        embedding = raw["model.embed_tokens.weight"]
        head = raw.get("lm_head.weight", embedding) * (raw["model.norm.weight"] * shape.hidden**0.5)
        return Weights(embedding, layers, _columns(head))
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder} holds no whole Qwen3 model ({error!r})", "give the folder of a model in float32") from None


def _layer(raw: dict[str, Array], name: str, shape: Shape) -> Layer:
    attention, mlp, scale = f"{name}.self_attn", f"{name}.mlp", shape.hidden**0.5
    q_norm, k_norm = raw[f"{attention}.q_norm.weight"], raw[f"{attention}.k_norm.weight"] * shape.head_dim**0.5
    qkv = np.concatenate([raw[f"{attention}.{part}_proj.weight"] for part in "qkv"])
    gate_up = np.concatenate([raw[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")])
    return Layer(
        qkv=_columns(qkv * (raw[f"{name}.input_layernorm.weight"] * scale)),
        qk_norm=np.concatenate([np.tile(q_norm, (shape.heads, 1)), np.tile(k_norm, (shape.kv_heads, 1))]),
        out=_columns(raw[f"{attention}.o_proj.weight"]),
        gate_up=_columns(gate_up * (raw[f"{name}.post_attention_layernorm.weight"] * scale)),
        down=_columns(raw[f"{mlp}.down_proj.weight"]),
    )


def _columns(weight: Array) -> Array:
    return np.ascontiguousarray(weight.T)


class Decoder:
    """Prefill and decoding steps of one model for rows of at most ``max_length`` tokens, prompt and completion together."""

    def __init__(self, shape: Shape, weights: Weights, max_length: int) -> None:
        self.shape = shape
        self.weights = weights
        frequency = shape.rope_theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = np.tile(np.outer(np.arange(max_length), frequency), 2)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def new_cache(self, slots: int, size: int) -> list[Array]:
        """An empty cache: one [slots, 2 kv_heads, size, head_dim] a layer, keys before values."""
        shape = (slots, 2 * self.shape.kv_heads, size, self.shape.head_dim)
        return [np.zeros(shape, np.float32) for _ in range(self.shape.layers)]

    def prefill(self, tokens: Sequence[int]) -> tuple[list[Array], Array]:
        """The cache rows [2 kv_heads, tokens, head_dim] of each layer, and the next-token logits [vocabulary]."""
        length, kv_heads = len(tokens), self.shape.kv_heads
        causal = np.triu(np.full((length, length), -np.inf, np.float32), 1)
        x = self.weights.embedding[np.asarray(tokens)]
        rows = []
        for layer in self.weights.layers:
            q, kv = self._split(_normed(x, self.shape.eps) @ layer.qkv, layer, np.arange(length))
            rows.append(np.ascontiguousarray(kv.swapaxes(0, 1)))
            keys, values = rows[-1][:kv_heads, None], rows[-1][kv_heads:, None]
            grouped = q.swapaxes(0, 1).reshape(kv_heads, -1, length, self.shape.head_dim)
            attended = _softmax(grouped @ keys.swapaxes(2, 3) + causal) @ values  # [kv_heads, group, tokens, head_dim]
            x = x + attended.transpose(2, 0, 1, 3).reshape(length, -1) @ layer.out
            x = x + _gated(_normed(x, self.shape.eps) @ layer.gate_up) @ layer.down
        return rows, _normed(x[-1:], self.shape.eps)[0] @ self.weights.head

    def step(self, cache: Sequence[Array], tokens: Sequence[int], positions: Sequence[int]) -> Array:
        """Logits [rows, vocabulary] after ``tokens`` at ``positions``, which it writes into the first rows of ``cache``."""
        count, kv_heads, place = len(tokens), self.shape.kv_heads, np.asarray(positions)
        future = np.where(np.arange(cache[0].shape[2]) <= place[:, None], np.float32(0), np.float32(-np.inf))[:, None, None]
        x = self.weights.embedding[np.asarray(tokens)]
        for layer, whole in zip(self.weights.layers, cache, strict=True):
            rows = whole[:count]
            q, kv = self._split(_each(_normed(x, self.shape.eps), layer.qkv), layer, place)
            rows[np.arange(count), :, place] = kv
            grouped = q.reshape(count, kv_heads, -1, self.shape.head_dim)  # query heads by the key head they share
            attended = _softmax(grouped @ rows[:, :kv_heads].swapaxes(2, 3) + future) @ rows[:, kv_heads:]
            x = x + _each(attended.reshape(count, -1), layer.out)
            x = x + _each(_gated(_each(_normed(x, self.shape.eps), layer.gate_up)), layer.down)
        return _each(_normed(x, self.shape.eps), self.weights.head)

    def _split(self, fused: Array, layer: Layer, place: Any) -> tuple[Array, Array]:
        """Turned queries [rows, heads, head_dim], and turned keys with values [rows, 2 kv_heads, head_dim]."""
        heads, kv_heads, half = self.shape.heads, self.shape.kv_heads, self.shape.head_dim // 2
        parts = fused.reshape(len(fused), heads + 2 * kv_heads, self.shape.head_dim)
        qk = _normed(parts[:, : heads + kv_heads], self.shape.eps) * layer.qk_norm
        turned = np.concatenate([-qk[..., half:], qk[..., :half]], axis=-1)
        qk = qk * self.cos[place][:, None] + turned * self.sin[place][:, None]
        return qk[:, :heads], np.concatenate([qk[:, heads:], parts[:, heads + kv_heads :]], axis=1)


def length_class(tokens: int) -> int:
    """The padded length of a row of so many tokens: a function of the row alone."""
    size = SMALLEST_CLASS
    while size < tokens:
        size *= 2
    return size


def _each(x: Array, weight: Array) -> Array:
    """x @ weight, one row at a time."""
    return (x[:, None] @ weight)[:, 0]


def _normed(x: Array, eps: float) -> Array:
    """RMSNorm without its factor sqrt(size), which the weights hold."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps * x.shape[-1])


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _gated(gate_up: Array) -> Array:
    """SwiGLU: silu(gate) * up; silu by tanh, which cannot overflow."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return 0.5 * gate * (1.0 + np.tanh(0.5 * gate)) * up
