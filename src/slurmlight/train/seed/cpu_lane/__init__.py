"""The seed stack on a machine without GPUs: verl 0.5.0 and the CUDA wheel of vLLM 0.10.2, both as installed.

Only runs with ``job.gpus=0`` import this package. vLLM finds its platform through the public entry point; verl gets what a
CPU lacks from an import hook that every Python process of the run installs when it starts.
"""

from __future__ import annotations

import os
from pathlib import Path

from slurmlight.train.seed.cpu_lane import shims

__all__ = ["shims", "variables"]

_ENTRY_POINT = "[vllm.platform_plugins]\nslurmlight_cpu = slurmlight.train.seed.cpu_lane.platform:register\n"
_HOOK = "from slurmlight.train.seed.cpu_lane import shims\n\nshims.install()\n"


def variables(scratch: Path, threads: int) -> dict[str, str]:
    """Environment of the run's processes. ``scratch`` gets the folder that holds the entry point and the start hook."""
    folder = scratch / "python"
    info = folder / "slurmlight_cpu_lane-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slurmlight-cpu-lane\nVersion: 0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINT)
    (folder / "sitecustomize.py").write_text(_HOOK)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])),
        "VLLM_USE_V1": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "all",
        "OMP_NUM_THREADS": str(threads),
    }
