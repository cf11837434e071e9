"""Driver against CUDA, and the GPUs: asked for, visible, free. Without an NVIDIA driver only said so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmlight.cluster import gpus
from slurmlight.cluster.gpus import GpuError
from slurmlight.doctor import Finding

# Oldest driver of each CUDA major version (NVIDIA CUDA Compatibility guide, minor version compatibility).
DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
STACK_CUDA = {"seed": (12, 8), "current": (13, 0)}  # what docker/*/requirements.lock's torch is built with
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
COMPAT = Path("/usr/local/cuda/compat")


@dataclass(frozen=True)
class Driver:
    """``version`` is empty where no driver is loaded; ``compat`` says whether the forward-compatibility package is there."""

    version: tuple[int, ...] = ()
    compat: bool = False


def driver() -> Driver:
    try:
        text = KERNEL_MODULE.read_text()
    except OSError:
        text = ""
    return Driver(read_driver(text), any(COMPAT.glob("libcuda.so*")))


def read_driver(text: str) -> tuple[int, ...]:
    """The version in /proc/driver/nvidia/version: the first dotted number of the NVRM line."""
    found = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def torch_cuda(folders: list[Path]) -> tuple[int, ...]:
    """The CUDA version torch was built with, read from torch/version.py; empty without torch or for a CPU build."""
    for folder in folders:
        try:
            text = (folder / "torch/version.py").read_text()
        except OSError:
            continue
        found = re.search(r"^cuda\b.*?['\"](\d+)\.(\d+)['\"]", text, re.MULTILINE)
        return (int(found[1]), int(found[2])) if found else ()
    return ()


def check_driver(have: Driver, cuda: tuple[int, ...]) -> Iterator[Finding]:
    if not cuda:
        return
    wanted = DRIVERS.get(cuda[0], ())
    asked = f"CUDA {'.'.join(map(str, cuda))} needs driver {'.'.join(map(str, wanted[:1]))} or newer"
    if not have.version:
        yield Finding("driver", "ok", f"no NVIDIA driver here; {asked} on the node")
    elif have.version >= wanted:
        yield Finding("driver", "ok", f"driver {'.'.join(map(str, have.version))}: {asked}")
    else:
        shown = ".".join(map(str, have.version))
        stacks = "use the seed stack (CUDA 12.8)" if cuda[0] >= 13 and have.version >= DRIVERS[12] else "update the driver"
        why = "CUDA reports that the driver is too old, torch sees no GPU"
        if have.compat:
            mend = f"LD_LIBRARY_PATH={COMPAT}:$LD_LIBRARY_PATH on a data-centre GPU, or {stacks}"
            yield Finding("driver", "warning", f"driver {shown} with the forward-compatibility package; {asked}", why, mend)
        else:
            mend = f"{stacks}, or install the cuda-compat package in the image"
            yield Finding("driver", "error", f"driver {shown}; {asked}", why, mend)


def check_gpus(asked: int, value: str | None, in_job: bool, query: Callable[[], tuple[gpus.Gpu, ...]]) -> Iterator[Finding]:
    """``asked`` GPUs a node against CUDA_VISIBLE_DEVICES (``value``) and nvidia-smi. Outside a job nothing is bound yet."""
    mend = "wait, or exclude the node: launch.py --exclude NODE"
    try:
        devices = gpus.visible(value, asked) if in_job else ()
        rows = query()
    except GpuError as error:
        severity = "error" if asked and in_job else "ok"
        what = error.what if severity == "error" else f"no GPU to look at here ({error.what})"
        yield Finding("gpus", severity, what, *(("the payload would not start", error.mend) if severity == "error" else ()))
        return
    own = {int(device) for device in devices if device.isdecimal()} if in_job else {row.index for row in rows}
    taken = gpus.busy(rows, own)
    for row in taken:
        what = f"GPU {row.index} holds {row.used} of {row.total} MiB"
        severity = "error" if in_job else "warning"
        yield Finding("gpus", severity, what, "vLLM fails: free memory below gpu_memory_utilization", mend)
    if not taken:
        yield Finding("gpus", "ok", f"{len(own)} of {len(rows)} GPUs looked at, none is busy")
