"""How the ranks of the verl engine find one another. That they train is shown by tests/test_verl_engine.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.stack
pytest.importorskip("verl", reason="verl is not installed (requirements-stack.lock)")

ELSEWHERE = """
import pickle, sys
host, port = pickle.loads(sys.stdin.buffer.read())()
print(int(port) > 0 and bool(host), sorted({"torch", "verl", "vllm", "slurmlight"} & set(sys.modules)))
"""


def test_the_ranks_meeting_place_is_found_without_an_import_of_verl() -> None:
    from ray import cloudpickle

    from slurmlight.train.verl import group

    task = cloudpickle.dumps(group._meeting_place()._function)
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=task, capture_output=True, timeout=300, check=False)
    assert done.stdout.decode().strip() == "True []", done.stderr.decode()[-2000:]
