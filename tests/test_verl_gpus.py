"""GPUs that hold no memory after a step are told of by number."""

from __future__ import annotations

from slurmlight.train.verl.gpus import idle


def test_all_busy() -> None:
    assert idle("0, 71000\n1, 70500\n", 2) == []


def test_one_of_four_idle_is_named() -> None:
    assert idle("0, 71000\n1, 4\n2, 70000\n3, 69000\n", 4) == [
        "1 of 4 GPUs idle after the first step (no memory in use on GPU 1)"
    ]


def test_gpus_of_another_job_beside_ours() -> None:
    assert idle("0, 71000\n1, 4\n", 1) == []
