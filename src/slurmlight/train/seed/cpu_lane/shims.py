"""What verl 0.5.0 asks of an accelerator and a CPU does not have, added right after the module that asks was imported.

An import hook, because verl's modules take such names from each other while they are imported, in every Ray worker.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def install() -> None:
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    def __init__(self) -> None:
        self.busy: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _SHIMS or fullname in self.busy:
            return None
        self.busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.busy.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, shim = spec.loader.exec_module, _SHIMS[fullname]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            shim(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _device(module: ModuleType) -> None:
    """verl.utils.device: no NCCL; ``torch.cpu`` gets what verl calls on ``torch.cuda``."""
    import torch

    module.get_nccl_backend = lambda: "gloo"  # type: ignore[attr-defined]
    no_ops = "empty_cache ipc_collect reset_peak_memory_stats set_device"
    zeros = "memory_allocated memory_reserved max_memory_allocated max_memory_reserved"
    more: dict[str, Any] = dict.fromkeys(no_ops.split(), lambda *_, **__: None)
    more |= dict.fromkeys(zeros.split(), lambda *_, **__: 0)
    more |= {
        "mem_get_info": _memory,
        "get_device_name": lambda *_: "cpu",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
    }
    for name, function in more.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


def _memory(*_: Any) -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _workers(_: ModuleType) -> None:
    """verl.workers.fsdp_workers: "cpu:gloo,cpu:gloo" names cpu twice, and FSDP1 refuses to broadcast from the CPU."""
    import torch.distributed
    from torch.distributed.fsdp import _init_utils

    start = torch.distributed.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return start("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group
    _init_utils._check_module_states_for_sync_module_states = lambda _module_states: None


_SHIMS: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.device": _device,
    "verl.workers.fsdp_workers": _workers,
}
