"""Ray over the nodes of a job: one srun step runs this module's ``main`` on every node, in the container.

    cluster = RayCluster(plan, attempt, nodes, folder, env, output)      # batch host; then payload with cluster.variables()
    python -m slurmlight.cluster.raycluster FOLDER GPUS CPUS ROOT        # one task a node; task 0 is the head

On one node there is no cluster: the trainer starts Ray itself. All nodes share a token (a file of mode 0600 in the attempt's
folder, by which Ray authenticates) and the head's address (head.json there). The trainer counts, and names who is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmlight.cluster import container, ports, processes
from slurmlight.files import read_json, write_atomic
from slurmlight.plan import JobPlan

HEAD_S = 180.0  # for the head to write its address, seen through a shared file system
RESOURCE = "slurmnode:"  # a node offers this resource with its Slurm name: host names may be shared or shortened


class RayCluster:
    """The step that runs Ray on all nodes; it ends with the process that made this object, or by ``end``."""

    def __init__(
        self, plan: JobPlan, attempt: int, nodes: Sequence[str], folder: Path, env: Mapping[str, str], output: int
    ) -> None:
        """``folder`` is the attempt's, on a file system all nodes share. Raises OSError, or UserError of the container."""
        self.nodes, self.folder = tuple(nodes), folder
        (folder / "head.json").unlink(missing_ok=True)
        write_atomic(folder / "ray-token", secrets.token_hex(32), mode=0o600)
        argv = [sys.executable, "-m", "slurmlight.cluster.raycluster", str(folder), str(plan.gpus), str(plan.cpus)]
        argv.append(str(ports.root(plan.scratch)))
        wrapped = container.wrap(
            plan, argv, attempt, role="ray", launcher=srun(len(nodes)), environ=dict(env) | self.variables()
        )
        self.process = processes.spawn(
            wrapped, env=_step_environment(env) | self.variables(), output=output, cwd=plan.project_folder
        )

    def variables(self) -> dict[str, str]:
        """What payload and Ray nodes need: no secret, only where it lies."""
        return {
            "SLURMLIGHT_RAY_HEAD": str(self.folder / "head.json"),
            "SLURMLIGHT_RAY_NODES": ",".join(self.nodes),
            "RAY_enable_worker_prestart": "0",  # idle workers would import torch and verl for nothing
            "RAY_worker_niceness": "0",  # 15 by default: agents would push vLLM and the trainer aside
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray-token"),
        }

    def lost(self, patience_s: float = 0.0) -> str:
        """What is wrong; empty while every node is there. One lost node ends the step, and with it the attempt."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        code = self.process.poll()
        return "" if code is None else f"Ray lost a node: its step ended with code {code}"

    def end(self) -> None:
        """End the step; Slurm ends its tasks on all nodes."""
        processes.end([self.process.pid], grace=10.0)
        self.process.wait()
        (self.folder / "ray-token").unlink(missing_ok=True)


def srun(nodes: int) -> list[str]:
    """One task a node beside the others of the job; the first that ends ends all."""
    shape = (f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mem=0")
    return ["srun", "--overlap", "--kill-on-bad-exit=1", "--quiet", "--job-name=ray", *shape]


def _step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without the batch script's own shape, which srun would take as defaults and refuse."""
    refused = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_MEM_PER", "SLURM_CPUS_PER_TASK")
    return {name: value for name, value in env.items() if not name.startswith(refused)}


# on each node


def main() -> int:
    folder, gpus, cpus = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank, job = int(os.environ["SLURM_PROCID"]), os.environ["SLURM_JOB_ID"]
    attempt = int(folder.name) if folder.name.isdigit() else 0
    temp = ports.temp_folder(job, attempt, Path(sys.argv[4]))
    with ports.reserve(f"{job}.{rank}", attempt) as reserved:
        for note in reserved.notes:
            print(note, flush=True)
        head = _announce(folder, reserved.ports) if rank == 0 else _await_head(folder)
        argv = start_command(reserved.ports, head, rank == 0, temp, max(gpus, 1), cpus, os.environ)
        # vLLM's sockets and verl's locks go into the attempt's folder too, and with it
        ray = subprocess.Popen(argv, preexec_fn=processes.die_with_parent, env={**os.environ, "TMPDIR": str(temp)})
        signal.signal(signal.SIGTERM, lambda *_: ray.terminate())
        ray.wait()
    shutil.rmtree(temp, ignore_errors=True)
    with contextlib.suppress(OSError):  # the job's caches may be beside it
        temp.parent.rmdir()
    return 1  # whatever made it end: the step must end on all nodes, and Slurm does that for a code other than 0


def start_command(
    reserved: ports.Ports, head: str, is_head: bool, temp: Path, gpus: int, cpus: int, env: Mapping[str, str]
) -> list[str]:
    """``ray start`` for this node; it stays in the foreground. Workers take the temp folder's name from the head."""
    workers = reserved.workers
    options = {
        "num-gpus": gpus,
        "num-cpus": max(cpus, 16),  # Ray only counts them; verl's actors ask for more than a small test node has
        "min-worker-port": workers.start,
        "max-worker-port": workers.stop - 1,
        "resources": json.dumps({f"{RESOURCE}{env['SLURMD_NODENAME']}": 1}),
    } | {name: port for name, port in reserved.ray_node.items() if not name.startswith("dashboard")}
    mine = (
        ["--head", f"--port={reserved.ray_head}", f"--temp-dir={temp}", "--include-dashboard=false"]
        if is_head
        else [f"--address={head}"]
    )
    given = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *mine, *given]


def _announce(folder: Path, reserved: ports.Ports) -> str:
    address = f"{own_address(os.environ['SLURMLIGHT_RAY_NODES'].split(','))}:{reserved.ray_head}"
    write_atomic(folder / "head.json", json.dumps({"address": address}))
    return address


def own_address(nodes: Sequence[str]) -> str:
    """Where the others of ``nodes`` reach this one. Its own name will not do: /etc/hosts often has it at 127.0.1.1."""
    for name in nodes:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends nothing: the kernel looks up the route, and with it the interface
            if not (address := probe.getsockname()[0]).startswith("127."):
                return address
    return socket.gethostbyname(socket.gethostname())


def _await_head(folder: Path) -> str:
    deadline = time.monotonic() + HEAD_S
    while time.monotonic() < deadline:
        if found := read_json(folder / "head.json"):
            return str(found["address"])
        time.sleep(0.5)
    raise SystemExit(f"the head of the Ray cluster gave no address within {HEAD_S:.0f} s ({folder / 'head.json'})")


if __name__ == "__main__":
    sys.exit(main())
