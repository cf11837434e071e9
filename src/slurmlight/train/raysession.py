"""Ray for one attempt, whatever drives verl: started on this machine, or the cluster that the job's nodes form."""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from slurmlight.errors import UserError
from slurmlight.files import read_json

TRIES = 4  # of starting Ray
JOIN_S = 300.0  # for the nodes of a job to form one cluster


def check_machine(gpus: int, nodes: int, there: int) -> None:
    """Raises UserError for nodes without a cluster, or for GPUs that this machine does not have (``there`` are)."""
    joined = "SLURMLIGHT_RAY_NODES" in os.environ
    if nodes > 1 and not joined:
        raise UserError(f"job.nodes={nodes} but no Ray cluster was formed over the nodes", "use one node (--nodes 1)")
    if not joined and gpus > there:
        raise UserError(f"job.gpus={gpus} but this machine shows {there}", "ask for fewer, or see why nvidia-smi shows less")


@contextlib.contextmanager
def ray_session(scratch: Path, runtime: Mapping[str, Any], gpus: int, cpus: int) -> Iterator[None]:
    """Ray with the runtime environment ``runtime``; shut down on leaving, with every worker.

    Raises RuntimeError naming the nodes that did not join in time.
    """
    nodes = [name for name in os.environ.get("SLURMLIGHT_RAY_NODES", "").split(",") if name]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if nodes:
        _init(runtime_env=runtime, address=_head_address(Path(os.environ["SLURMLIGHT_RAY_HEAD"])))
    else:
        _init(
            runtime_env=runtime,
            num_cpus=max(cpus, 16),  # Ray only counts them; verl's actors ask for about ten
            num_gpus=max(gpus, 1),
            include_dashboard=False,
            _temp_dir=str(scratch / "ray"),
            object_store_memory=(4 << 30) if gpus else (200 << 20),
        )
    for number, handler in handlers.items():  # Ray's own would end the run at once, without a checkpoint
        signal.signal(number, handler)
    try:
        _await_nodes(nodes, max(gpus, 1))
        yield
    finally:
        ray.shutdown()


def _head_address(told: Path) -> str:
    deadline = time.monotonic() + JOIN_S
    while time.monotonic() < deadline:
        if found := read_json(told):
            return str(found["address"])
        time.sleep(0.5)
    raise RuntimeError(f"the head of the Ray cluster did not come up within {JOIN_S:.0f} s ({told} is missing)")


def _await_nodes(nodes: Sequence[str], gpus: int) -> None:
    """Until each of ``nodes`` (names in Slurm; none: this machine alone) is there with its GPUs."""
    deadline = time.monotonic() + JOIN_S
    while nodes:
        offered = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        missing = [name for name in nodes if not any(f"slurmnode:{name}" in one for one in offered)]
        poor = sum(one.get("GPU", 0) for one in offered) < gpus * len(nodes)
        if not missing and not poor:
            return
        if time.monotonic() > deadline:
            what = f"nodes {', '.join(missing)} did not join Ray" if missing else f"Ray's nodes offer too few GPUs: {offered}"
            raise RuntimeError(f"{what} within {JOIN_S:.0f} s; see the attempt's log for their words")
        time.sleep(1)


def _init(**options: Any) -> None:
    """ray.init, again where its fixed 30 s for the raylet were not enough (a node under load, a slow file system)."""
    for attempt in range(1, TRIES + 1):
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(log_to_driver=True, **options)
            return
        except Exception as error:
            for left in set(psutil.Process().children(recursive=True)) - before:  # Ray leaves what it had started
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            if "timed out during startup" not in str(error) or attempt == TRIES:
                raise
            print(f"Ray did not start in time (try {attempt} of {TRIES})", flush=True)
