"""launch.py and slurm/train.sbatch in front of a real Slurm: what is submitted, refused, and how it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmlight import launching, plan, presets
from slurmlight.cli import main
from slurmlight.cluster import slurm, submit
from slurmlight.cluster.refusals import SubmitRefused
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
    record = read_json(home / "checkpoints/one/job.json") or {}
    shown = cluster.job(int(record["job_id"]))
    assert shown["Requeue"] == "1" and shown["Partition"] == "a800"
    again = launch(home, "--preset", "tiny", "--cpus", "1", "--no-follow", "--name", "one")
    assert again.returncode == 0 and "works on this run already" in again.stdout
    assert (read_json(home / "checkpoints/one/job.json") or {})["job_id"] == record["job_id"]  # no second job
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


@pytest.fixture(scope="module")
def strict(slurm: SlurmBed) -> Iterator[SlurmBed]:
    """A cluster of its own that refuses at once what a partition's limits forbid, as most do."""
    with SlurmBed() as bed:
        with open(bed.env["SLURM_CONF"], "a") as conf:
            conf.write("EnforcePartLimits=ALL\n")
        bed.run("scontrol", "reconfigure")
        bed.run("scontrol", "create", "PartitionName=short", "Nodes=ALL", "MaxTime=60")
        bed.run("scontrol", "create", "PartitionName=group", "Nodes=ALL", "AllowAccounts=physics")
        yield bed


@pytest.fixture
def pointed(strict: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> SlurmBed:
    for name, value in strict.env.items():
        monkeypatch.setenv(name, value)
    return strict


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"partition": "nowhere"}, "invalid partition specified: nowhere", "choose a partition that exists: a800, urgent"),
    ({"partition": "group", "account": "chemistry"}, "Invalid account or account/partition combination", "check --account"),
    (
        {"partition": "short", "time": "02:00:00"},
        "Requested time limit is invalid",
        "check --time against the partition's MaxTime",
    ),
    ({"gpus": 8, "gpu_type": "a800"}, "Requested node configuration is not available", "what a node has"),
    ({"gpus": 1, "gpu_type": "h20"}, "Requested node configuration is not available", "what a node has"),
    ({"mem": "9000G"}, "Memory specification can not be satisfied", "lower --mem"),
    ({"constraint": "fast"}, "Invalid feature specification", "check --constraint"),
    ({"exclude": "nono"}, "Invalid node name specified", "check --exclude"),
]


@pytest.mark.parametrize(("asked", "words", "mend"), REFUSED, ids=[",".join(asked) for asked, _, _ in REFUSED])
def test_sbatchs_own_refusals_come_with_what_to_change(
    asked: dict[str, Any], words: str, mend: str, home: Path, pointed: SlurmBed
) -> None:
    made = plan.JobPlan("no", str(home / "checkpoints/no"), str(home), "slurm", "tiny", ("true",))
    Path(made.run_folder).mkdir()
    with pytest.raises(SubmitRefused) as refused:
        submit.submit(replace(made, **({"partition": "a800", "time": "5"} | asked)))
    assert words in refused.value.what and mend in refused.value.mend and refused.value.exit_code == 2
    assert not RunFolder(made.run_folder).job.exists(), "nothing is recorded as submitted"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--partition", "group", "--account", "chemistry"), ("Invalid account", "check --account")),
        (("--partition", "short", "--time", "02:00:00"), ("Requested time limit is invalid", "MaxTime")),
    ],
    ids=["account", "time"],
)
def test_a_refused_launch_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], told: tuple[str, ...], home: Path, pointed: SlurmBed
) -> None:
    done = launch(home, "--preset", "tiny", "--cpus", "1", "--no-follow", *arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stdout + done.stderr
    assert all(word in done.stderr for word in ("Slurm refuses the job", *told))


def test_a_controller_that_is_down_is_waited_for(home: Path, pointed: SlurmBed) -> None:
    pointed.stop_controller()
    argv = [
        sys.executable,
        str(REPOSITORY / "launch.py"),
        "--preset",
        "tiny",
        "--cpus",
        "1",
        "--partition",
        "a800",
        "--no-follow",
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=home) as process:
        assert process.stderr
        said = process.stderr.readline()
        pointed.start_controller()
        out, rest = process.communicate(timeout=120)
    assert "Unable to contact slurm controller" in said and "next try in 2 s, giving up in" in said
    assert process.returncode == 0, said + rest
    assert "job  " in out and read_json(home / "checkpoints/tiny/job.json")
    pointed.cancel_all()


def test_a_controller_that_stays_down_ends_the_launch(
    home: Path, pointed: SlurmBed, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "PATIENCE_S", 8.0)
    pointed.stop_controller()
    try:
        with pytest.raises(SystemExit) as ended:
            main(["launch", "--preset", "tiny", "--partition", "a800", "--no-follow"])
    finally:
        pointed.start_controller()
    *waits, last = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2 and waits and all("next try in" in line for line in waits)
    assert "Unable to contact slurm controller" in last and "for 8 s" in last and "try again later (scontrol ping)" in last
    assert not (home / "checkpoints/tiny").exists()
