"""verl 0.9 and vLLM 0.24 on a machine without GPUs: verl imports this module in every process that it starts.

Named in ``VERL_USE_EXTERNAL_MODULES`` by ``environment.cpu``. A logical Ray "GPU" stands for the CPU.
What each patch is for is said at the patch; nothing here is used where a GPU is present.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import sys
from multiprocessing import shared_memory
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """What a device without memory pools, streams or profilers does."""


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


def _memory(*_args: Any) -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> ModuleType:
    """``torch.cpu`` plus what verl calls on ``torch.cuda``."""
    module = ModuleType("slurmlight_cpu_device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in ("is_available", "current_stream", "stream", "Stream")})
    no_ops = "synchronize empty_cache set_device ipc_collect reset_peak_memory_stats set_per_process_memory_fraction"
    module.__dict__.update(dict.fromkeys(no_ops.split(), _nothing))
    zeros = "memory_allocated memory_reserved max_memory_allocated max_memory_reserved"
    module.__dict__.update(dict.fromkeys(zeros.split(), _zero))
    module.__dict__.update(
        device_count=lambda: 1,
        current_device=lambda: torch.device("cpu"),
        get_device_name=lambda *_: "cpu",
        mem_get_info=_memory,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        Event=torch.Event,
    )
    return module


_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU in the place of an accelerator; Ray's logical GPUs count the processes."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> Any:
        return _MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str):  # pyright: ignore[reportIncompatibleMethodOverride]
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights go to vLLM through shared memory

    def cudart(self) -> None:
        return None


def _one_gloo() -> None:
    """verl asks for "cpu:gloo,<device>:<backend>", which names cpu twice here: torch refuses that."""
    import torch.distributed

    start = torch.distributed.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return start("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _closable_shared_memory() -> None:
    """The receiver of weights closes its segment while tensors still view it; the map then lives until they are gone."""
    close = shared_memory.SharedMemory.close

    def close_or_leave(self: shared_memory.SharedMemory) -> None:
        with contextlib.suppress(BufferError):
            close(self)

    shared_memory.SharedMemory.close = close_or_leave


def _unpacked_weights() -> None:
    """vLLM repacks linear weights for the CPU and drops the originals; new weights could then not be loaded into them."""
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep


_one_gloo()
_closable_shared_memory()
if "vllm" in sys.modules:  # vLLM's workers import verl through its worker extension, after vllm
    _unpacked_weights()
