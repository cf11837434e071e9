"""Ray workers of the verl engine, two of them with a (logical) GPU each: what they know when verl looks for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack
pytest.importorskip("verl", reason="verl is not installed (requirements-stack.lock)")

WITNESS = "import os\nSEEN = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
RANK = """
import verl, gpu_witness
class Rank:
    def told(self):
        from slurmlight.train.verl import logits
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
        from verl.utils import torch_functional
        quick = torch_functional.logprobs_from_logits_v2 is logits.logprobs
        return gpu_witness.SEEN, "per_rollout_mean" in POLICY_LOSS_REGISTRY, quick
"""
SCRIPT = """
import json, sys
from pathlib import Path
from slurmlight.train.verl import environment
scratch = Path(sys.argv[1])
variables = environment.COMMON | environment.cpu(scratch)
variables[environment.PLUG_IN] += ",gpu_witness"
variables["PYTHONPATH"] = f"{scratch}:{variables['PYTHONPATH']}"
environment.apply(variables)
import ray
from slurmlight.train.verl import start
import rank
with start.ray_session(scratch, variables, gpus=2, cpus=2):
    ranks = [ray.remote(num_gpus=1, num_cpus=0)(rank.Rank).remote() for _ in range(2)]
    print("TOLD", json.dumps(ray.get([one.told.remote() for one in ranks])))
"""


def test_a_worker_knows_which_gpu_is_its_own_before_verl_looks_and_has_losses_and_log_probabilities() -> None:
    with tempfile.TemporaryDirectory(prefix="sl-") as folder:  # short: Ray's socket paths end at 107 bytes
        scratch = Path(folder)
        (scratch / "gpu_witness.py").write_text(WITNESS)
        (scratch / "rank.py").write_text(RANK)
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(scratch)], capture_output=True, text=True, timeout=600, env=env, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert lines, done.stderr[-3000:]
    told = json.loads(lines[0].removeprefix("TOLD "))
    assert sorted(one[0] for one in told) == ["0", "1"]
    assert all(losses and quick for _, losses, quick in told)
