"""Paged attention in plain torch, on vLLM 0.10.2's own CPU backend classes: any mix of prefill chunks and decoding."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends.cpu_attn import TorchSDPABackend, TorchSDPABackendImpl, TorchSDPAMetadataBuilderV1


class TorchBackend(TorchSDPABackend):
    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """Any will do."""

    @staticmethod
    def get_impl_cls() -> type:
        return TorchAttention

    @staticmethod
    def get_builder_cls() -> type:
        return TorchMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return 2, num_blocks, block_size, num_kv_heads, head_size


class TorchMetadataBuilder(TorchSDPAMetadataBuilderV1):
    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        return False  # prefill and decoding are the same here: nothing to sort, block_tables holds all requests


class TorchAttention(TorchSDPABackendImpl):
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor | None = None,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> torch.Tensor:
        """``query`` (tokens, heads x size) of all requests one after the other, and the same of the result."""
        if attn_metadata is None:  # profiling
            return query
        heads = query.view(-1, self.num_heads, self.head_size)
        keys, values = kv_cache
        size = keys.shape[1]
        slots = attn_metadata.slot_mapping
        keys[slots // size, slots % size] = key.view(-1, self.num_kv_heads, self.head_size)
        values[slots // size, slots % size] = value.view(-1, self.num_kv_heads, self.head_size)
        result = torch.empty_like(heads)
        starts = attn_metadata.query_start_loc.tolist()
        for number, length in enumerate(attn_metadata.seq_lens):
            blocks = attn_metadata.block_tables[number, : -(-length // size)]
            here = slice(starts[number], starts[number + 1])
            known, said = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values))
            asked = heads[here].transpose(0, 1)
            mask = torch.ones(asked.shape[1], length, dtype=torch.bool).tril(length - asked.shape[1])
            found = scaled_dot_product_attention(asked, known, said, mask, scale=self.scale, enable_gqa=True)
            result[here] = found.transpose(0, 1)
        return result.view(-1, self.num_heads * self.head_size)
