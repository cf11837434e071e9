"""vLLM 0.10.2's CUDA wheel on a CPU: a platform whose attention is plain torch, found through vLLM's entry point.

The stock CPU platform needs kernels that only a CPU build of vLLM has (``torch.ops._C``) or IPEX.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform


def register() -> str | None:
    """The entry point: this platform's name, or None where there is a GPU."""
    return None if torch.cuda.is_available() else f"{__name__}.TorchCpuPlatform"


class TorchCpuPlatform(CpuPlatform):
    def is_sleep_mode_available(self) -> bool:
        return True  # sleeping and waking are calls that carry weights here, see below

    @classmethod
    def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        return "slurmlight.train.seed.cpu_lane.attention.TorchBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        vllm_config.compilation_config.custom_ops = ["none"]  # torch's own RMSNorm, RoPE and SiLU
        if vllm_config.model_config is not None:  # its check is over; the memory allocator behind it is CUDA's
            vllm_config.model_config.enable_sleep_mode = False
