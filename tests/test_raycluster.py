"""Ray over a job's nodes: the commands, and (marks slurm and stack) two nodes of a real Slurm that form one cluster."""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from pathlib import Path

import pytest

from slurmlight.cluster import raycluster
from slurmlight.cluster.ports import Ports
from tests.slurmbed import SlurmBed, wait_for


def command(is_head: bool) -> list[str]:
    env = {"SLURMD_NODENAME": "a800-2"}
    return raycluster.start_command(Ports(20_000), "10.0.0.1:20001", is_head, Path("/tmp/s/1"), 4, 32, env)


def test_the_head_opens_its_port_and_workers_join_it() -> None:
    assert {"--head", "--port=20001", "--temp-dir=/tmp/s/1"} <= set(command(True))
    assert "--address=10.0.0.1:20001" in command(False)
    assert "--head" not in command(False) and not any(part.startswith("--temp-dir") for part in command(False))


@pytest.mark.parametrize("is_head", [True, False])
def test_every_port_is_of_the_block_and_the_node_tells_its_slurm_name(is_head: bool) -> None:
    options = dict(part[2:].split("=", 1) for part in command(is_head) if part.startswith("--") and "=" in part)
    ports = [int(value) for name, value in options.items() if name.endswith("port")]
    assert len(ports) == len(set(ports)) and all(20_000 <= port < 20_256 for port in ports)
    assert json.loads(options["resources"]) == {"slurmnode:a800-2": 1}
    assert (options["num-gpus"], options["num-cpus"]) == ("4", "32")


def test_the_step_has_one_task_a_node_and_ends_with_the_first_that_ends() -> None:
    argv = raycluster.srun(3)
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--overlap"} <= set(argv)


JOB = textwrap.dedent("""\
    import json, os, sys, time
    from pathlib import Path
    from slurmlight.cluster.raycluster import RayCluster
    from slurmlight.plan import JobPlan

    folder, nodes = Path(sys.argv[1]), sys.argv[2].split(",")
    plan = JobPlan(name="t", run_folder=str(folder), project_folder=str(folder), cluster="slurm", preset="t",
                   payload=(), nodes=len(nodes), gpus=1, cpus=2)
    cluster = RayCluster(plan, 1, nodes, folder, os.environ, 1)
    os.environ.update(cluster.variables())
    from slurmlight.train.verl import start
    import ray
    try:
        with start.ray_session(folder, {}, 1, 2):
            there = {name for node in ray.nodes() for name in node["Resources"] if name.startswith("slurmnode:")}
            (folder / "formed.json").write_text(json.dumps({"nodes": sorted(there), "gpus": ray.cluster_resources()["GPU"]}))
    finally:
        cluster.end()
""")


@pytest.mark.slurm
@pytest.mark.stack
def test_two_nodes_of_a_slurm_form_one_cluster(cluster: SlurmBed, tmp_path: Path) -> None:
    for package in ("ray", "verl"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (requirements-stack.lock)")
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    source = Path(raycluster.__file__).parents[2]
    wrap = f"env PYTHONPATH={source} {sys.executable} {folder}/job.py {folder} a800-1,a800-2"
    job = cluster.run(
        "sbatch",
        "--parsable",
        "--nodes=2",
        "--nodelist=a800-1,a800-2",
        "--gres=gpu:1",
        f"--output={folder}/log",
        f"--wrap={wrap}",
    ).strip()
    formed = folder / "formed.json"

    def over() -> bool:
        return formed.exists() or not cluster.run("squeue", "-h", "-j", job, "-t", "PENDING,RUNNING").strip()

    wait_for(over, "two Ray nodes", limit_s=900, every_s=1)
    assert formed.exists(), (folder / "log").read_text()[-3000:]
    assert json.loads(formed.read_text()) == {"nodes": ["slurmnode:a800-1", "slurmnode:a800-2"], "gpus": 2.0}
    wait_for(lambda: not cluster.run("squeue", "-h", "-j", job, "-t", "RUNNING").strip(), "the end of the job", limit_s=120)
    assert not (folder / "ray-token").exists()
