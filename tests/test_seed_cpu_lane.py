"""The proof lane itself: vLLM's CUDA wheel on a CPU gives the tokens that transformers gives (mark ``seed``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import trainbed
from tests.shared import REPOSITORY

pytestmark = pytest.mark.seed
pytest.importorskip("agentlightning.verl.daemon", reason="the seed stack is not installed (make test-seed)")


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Three prompts of different length at once: prefill in one batch, then decoding."""
    trainbed.write_model(tmp_path / "models/random")
    command = [sys.executable, "-m", "tests.seedgreedy", str(tmp_path / "models/random")]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == [True, True, True]
