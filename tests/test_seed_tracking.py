"""The seed stack's SwanLab takes a run offline as the tracker starts it (mark ``seed``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmlight.runfolder import RunFolder
from slurmlight.tracking.names import REWARD, STEP
from slurmlight.tracking.tracker import Tracker
from tests import seedbed

pytestmark = pytest.mark.seed
pytest.importorskip("agentlightning.verl.daemon", reason="the seed stack is not installed (make test-seed)")


def test_offline_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    run = RunFolder(seedbed.make_run(tmp_path))
    with Tracker(run, ("console", "swanlab"), 2, 0) as tracker:
        for step in (1, 2):
            tracker.log({STEP: step, REWARD: 0.5})
    assert "SwanLab is off" not in capsys.readouterr().out
    assert list((run.path / "swanlab").glob("run-*"))
