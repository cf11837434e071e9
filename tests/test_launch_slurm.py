"""launch.py and slurm/train.sbatch in front of a real Slurm: what is submitted, refused, and how it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmlight import launching, plan, presets
from slurmlight.files import read_json
from slurmlight.runfolder import RunFolder
from tests.shared import REPOSITORY
from tests.slurmbed import SlurmBed

pytestmark = pytest.mark.slurm


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project folder as a user has it: the environment, checkpoints/, nothing else. On a path that every node sees."""
    folder = Path(tempfile.mkdtemp(prefix="launch-"))
    (folder / "checkpoints").mkdir()
    (folder / ".venv").symlink_to(Path(sys.prefix))
    monkeypatch.setenv("SLURMLIGHT_HOME", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def launch(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "launch.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=home, env=dict(os.environ), timeout=120)


def finished_run(home: Path, cluster: str) -> RunFolder:
    """A tiny run with the finish mark: what a job finds that starts once more than it had to."""
    preset = presets.load("tiny", ["job.cpus=1"])
    made = plan.make_plan(preset, name="tiny", project=home, cluster=cluster, python=sys.executable)  # type: ignore[arg-type]
    run = launching.prepare(made, preset, fresh=False)
    run.mark_finished(30, 1)
    return run


def test_train_sbatch_reaches_the_supervisor_and_a_finished_run_is_a_no_op(home: Path, cluster: SlurmBed) -> None:
    finished_run(home, "slurm")
    options = ["--parsable", "--cpus-per-task=1", f"--chdir={home}"]
    command = ["sbatch", *options, str(REPOSITORY / "slurm/train.sbatch"), "--preset", "tiny", "--set", "job.cpus=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home, timeout=60)
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    cluster.wait_job(job, "COMPLETED", "FAILED")
    said = (home / f"checkpoints/slurm-{job}.log").read_text()
    assert cluster.job(job)["JobState"] == "COMPLETED", said
    assert "is finished: nothing to do" in said
    assert cluster.job(job)["Requeue"] == "1"


def test_train_sbatch_without_data_ends_with_one_line_and_exit_code_2(home: Path, cluster: SlurmBed) -> None:
    command = ["sbatch", "--parsable", "--cpus-per-task=1", str(REPOSITORY / "slurm/train.sbatch"), "--preset", "qwen"]
    done = subprocess.run([*command, "--stack", "current"], capture_output=True, text=True, cwd=home, timeout=60)
    job = int(done.stdout)
    cluster.wait_job(job, "COMPLETED", "FAILED")
    assert cluster.job(job)["ExitCode"] == "2:0"
    said = (home / f"checkpoints/slurm-{job}.log").read_text()
    assert "train_spider.parquet does not exist" in said and "Traceback" not in said


def test_launch_finds_slurm_by_itself_and_submits_through_submitit(home: Path, cluster: SlurmBed) -> None:
    done = launch(home, "--preset", "tiny", "--cpus", "1", "--partition", "a800", "--time", "soon")
    assert done.returncode == 2 and "soon" in done.stderr
    done = launch(home, "--preset", "tiny", "--cpus", "1", "--no-follow", "--name", "one")
    assert done.returncode == 0, done.stderr
    assert "sbatch answers here" in done.stdout
    record = read_json(home / "checkpoints/one/job.json")
    shown = cluster.job(int(record["job_id"]))
    assert shown["Requeue"] == "1" and shown["Partition"] == "a800"
    again = launch(home, "--preset", "tiny", "--cpus", "1", "--no-follow", "--name", "one")
    assert again.returncode == 0 and "works on this run already" in again.stdout
    assert read_json(home / "checkpoints/one/job.json")["job_id"] == record["job_id"]  # no second job
    cluster.cancel_all()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--partition", "a8000"), ("a8000", "did you mean a800", "urgent")),
        (("--partition", "a800", "--cpus", "64"), ("Slurm refuses the job", "Requested node configuration")),
        (("--partition", "a800", "--depend", "999999"), ("999999", "not known to Slurm")),
    ],
)
def test_what_slurm_cannot_give_is_refused_with_its_words(
    arguments: tuple[str, ...], told: tuple[str, ...], home: Path, cluster: SlurmBed
) -> None:
    done = launch(home, "--preset", "tiny", "--cpus", "1", "--no-follow", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    for word in told:
        assert word in done.stderr
    assert "Traceback" not in done.stderr and not (home / "checkpoints/tiny/job.json").exists()
