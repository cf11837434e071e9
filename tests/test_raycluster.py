"""Ray over a job's nodes: its commands. That they form a cluster and train is tests/test_verl_engine.py's."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from slurmlight.cluster import raycluster
from slurmlight.cluster.ports import Ports


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


def test_the_head_gives_the_address_of_its_way_to_the_others() -> None:
    """Not the loopback interface's, which the own name may stand for. 192.0.2.0/24 is nobody's (RFC 5737)."""
    own = socket.gethostbyname(socket.gethostname())
    assert raycluster.own_address(["localhost", "no.such.node.invalid"]) == own
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.77", 9))
    except OSError:
        pytest.skip("no route out of this machine")
    assert not raycluster.own_address(["localhost", "192.0.2.77"]).startswith("127.")


def test_the_step_has_one_task_a_node_and_ends_with_the_first_that_ends() -> None:
    argv = raycluster.srun(3)
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--overlap"} <= set(argv)
