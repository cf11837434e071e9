"""Whole runs of the embedded engine: killed anywhere, resumed to the same bits; clear ends; nobody left behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slurmlight.runfolder import RunFolder, StopRequest
from slurmlight.train import main as payload
from slurmlight.train.checkpoints import scan
from tests.trainbed import REPOSITORY, make_run

pytestmark = pytest.mark.train
STEPS = 5
SETTINGS = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.test_freq=5"]


@dataclass
class Trainer:
    """A training process, started as the supervisor would start it."""

    run: Path
    process: subprocess.Popen[str]

    def end(self, seconds: float = 400) -> tuple[int, str]:
        """Exit code and everything it said; nobody of it may be left soon after."""
        said, _ = self.process.communicate(timeout=seconds)
        eventually(lambda: not others(self.run))
        return self.process.returncode, said


def start(run: Path, **environment: str) -> Trainer:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.trainbed", str(run)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Trainer(run, process)


def train(run: Path, **environment: str) -> tuple[int, str]:
    return start(run, **environment).end()


def others(run: Path) -> list[psutil.Process]:
    """Every process that has the run folder in its command line: policy server, runners, gateway."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and str(run) in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found


def eventually(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def weights(run: Path) -> str:
    return hashlib.sha256((run / f"global_step_{STEPS}/actor/huggingface/model.safetensors").read_bytes()).hexdigest()


def rows(run: Path) -> dict[int, dict]:
    """Metrics by step, without what measures time and processors."""
    return {
        row["step"]: {key: value for key, value in row.items() if not key.startswith(("timing_s/", "cpu_s/"))}
        for row in RunFolder(run).metric_rows()
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A run that nobody disturbed."""
    run = make_run(home, "whole", SETTINGS)
    code, said = train(run)
    assert code == 0, said
    return run


def test_a_run_learns_saves_and_reports(whole: Path) -> None:
    folder = RunFolder(whole)
    assert (folder.finished() or {})["step"] == STEPS
    assert sorted(rows(whole)) == list(range(STEPS + 1))
    assert [one.step for one in scan(whole) if one.complete] == [2, 4, STEPS]
    assert folder.tracker.read_text() == str(STEPS)
    for step in range(1, STEPS + 1):
        row = rows(whole)[step]
        assert row["training/n_rollouts"] == 16
        assert row["training/n_turns"] == 32
        assert row["training/n_sample_trained"] == 8 * (4 - row["training/n_zero_adv_groups"])
        assert 0 < row["actor/lr"] <= 1e-3
    assert "val/reward" in rows(whole)[0] and "val/reward" in rows(whole)[STEPS]
    assert len(weights(whole)) == 64
    status = folder.status()
    assert status is not None
    assert (status.step, status.total_steps) == (STEPS, STEPS)
    assert (whole / "report/curve.png").stat().st_size > 1000


def test_a_finished_run_does_nothing_more(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    code, said = train(whole)
    assert code == 0
    assert f"was finished at step {STEPS}" in said
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()} == before


def test_killed_anywhere_and_stopped_it_ends_with_the_same_bits(home: Path, whole: Path) -> None:
    run = make_run(home, "disturbed", SETTINGS)
    for place, left in (("row 1", []), ("rollout 3", [2]), ("save 4", [2])):
        code, said = train(run, KILL_AT=place)
        assert code == -signal.SIGKILL, said
        assert [one.step for one in scan(run) if one.complete] == left, place
    stopped = start(run)
    eventually(lambda: (RunFolder(run).status() or never()).attempt == 4 and 3 in after_attempt(run))
    stopped.process.send_signal(signal.SIGTERM)
    code, said = stopped.end()
    assert code in (75, 0), said  # 0 where it was at its end already
    if code == 75:
        step = int(re.findall(r"stopped on request after step (\d+)", said)[0])
        assert step in [one.step for one in scan(run) if one.complete]
        code, said = train(run)
        assert code == 0, said
    assert weights(run) == weights(whole)
    assert rows(run) == rows(whole)


def never() -> RunFolder:
    raise AssertionError("no status")


def after_attempt(run: Path) -> set[int]:
    status = RunFolder(run).status()
    return set(range((status.step if status else 0) + 1))


def test_a_runner_may_die_but_not_the_policy_server(home: Path) -> None:
    run = make_run(home, "killed", [*SETTINGS, "trainer.total_training_steps=500"])
    trainer = start(run)
    folder = RunFolder(run)

    def at_step(step: int) -> Callable[[], bool]:
        return lambda: (status := folder.status()) is not None and status.step >= step

    eventually(at_step(1))
    child(run, "rollouts.runner").kill()
    eventually(at_step(4))
    child(run, "policy_server").kill()
    code, said = trainer.end()
    assert code == 1
    assert "runner-1 was killed by SIGKILL" in said
    assert "slurmlight: the policy server was killed by SIGKILL; start the run again" in said
    assert "Traceback" not in said
    assert 2 in [one.step for one in scan(run) if one.complete]


def child(run: Path, name: str) -> psutil.Process:
    return next(process for process in others(run) if any(name in word for word in process.cmdline()))


def test_a_full_disk_while_saving_is_said_plainly_and_leaves_nothing_half(home: Path) -> None:
    run = make_run(home, "full", SETTINGS)
    model = (home / "models/random/model.safetensors").stat().st_size
    code, said = train(run, LARGEST_FILE=str(int(model * 1.5)))  # the weights fit, the optimiser's two moments do not
    assert code == 1, said
    assert "Traceback" not in said
    assert re.search(r"slurmlight: .*(no room|too large)", said)
    assert scan(run) == []
    assert not (run / "latest_checkpointed_iteration.txt").exists()
    assert sorted(rows(run)) == [0, 1, 2]


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run to train in this very process: for what ends before any other process is started."""
    monkeypatch.setattr(payload, "_listen", lambda run: None)  # the signals of a test process are pytest's
    monkeypatch.delenv("SLURMLIGHT_ATTEMPT", raising=False)
    return make_run(home, tmp_path.name, SETTINGS)


def test_no_room_for_the_policys_own_copy_is_said_plainly_too(home: Path) -> None:
    run = make_run(home, "tight", SETTINGS)
    code, said = train(run, LARGEST_FILE="100000")
    assert code == 1, said
    assert "Traceback" not in said
    assert "make room" in said


def test_a_stop_before_the_first_step_saves_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder(here).request_stop(StopRequest("test", attempt=1))
    assert payload.main([str(here)]) == 75
    assert scan(here) == []
    assert "stopped on request" in capsys.readouterr().out


def change(run: Path, **sections: dict) -> None:
    config = json.loads((run / "config.json").read_text())
    for name, values in sections.items():
        config[name] |= values
    (run / "config.json").write_text(json.dumps(config))


def break_database(run: Path) -> None:
    data = run / "data"
    (data / "database/pets").mkdir(parents=True)
    (data / "database/pets/pets.sqlite").write_bytes(b"no database at all")
    for name in ("train", "val"):
        (data / f"{name}.parquet").write_bytes((run.parent / f"data/{name}.parquet").read_bytes())
    change(run, data={"train_files": f"{data}/train.parquet", "val_files": f"{data}/val.parquet"})


def tear_parquet(run: Path) -> None:
    (run / "train.parquet").write_bytes((run.parent / "data/train.parquet").read_bytes()[:300])
    change(run, data={"train_files": f"{run}/train.parquet"})


def adjust(run: Path, key: str, value: object) -> None:
    (run / "adjustments.json").write_text(json.dumps({key: value}))


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda run: (run / "config.json").unlink(), "no readable config.json"),
        (lambda run: (run / "config.json").write_text("{"), "no readable config.json"),
        (lambda run: change(run, data={"train_files": "/nowhere/train.parquet"}), "/nowhere/train.parquet does not exist"),
        (lambda run: change(run, data={"truncation": "left"}), "does not cut prompts"),
        (lambda run: change(run, algorithm={"use_kl_in_reward": True}), "no KL penalty inside the reward"),
        (lambda run: adjust(run, "data.train_batch_size", 4000), "fewer than data.train_batch_size=4000"),
        (lambda run: adjust(run, "data.train_batch_siez", 1), "train_batch_size"),
        (lambda run: adjust(run, "actor_rollout_ref.model.path", "/nowhere/model"), "no whole Qwen3 model"),
        (break_database, "no usable database"),
        (tear_parquet, "cannot be read as parquet"),
        (lambda run: (run / "global_step_3/actor").mkdir(parents=True), "none is complete"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    here: Path, break_it: Callable[[Path], object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it(here)
    assert payload.main([str(here)]) == 2
    said = capsys.readouterr().err.strip()
    assert says in said
    assert len(said.splitlines()) == 1


def test_a_checkpoint_of_another_seed_is_not_continued(whole: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole / "global_step_2", here / "global_step_2")
    adjust(here, "engine.seed", 1)
    assert payload.main([str(here)]) == 2
    assert "was trained with seed 0" in capsys.readouterr().err
