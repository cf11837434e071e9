"""Job ids in all spellings, and submissions that are never repeated blindly: acceptance cases J-01 to J-08."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from slurmlight.cluster import slurm, submit
from slurmlight.cluster.command import CommandGarbled
from slurmlight.cluster.jobid import JobId, JobIdError, parse, parse_all
from slurmlight.cluster.records import from_sacct, from_scontrol, from_squeue, sbatch_id
from slurmlight.cluster.states import State, classify, together
from slurmlight.errors import UserError
from tests.slurmbed import SlurmBed, wait_for

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        pytest.param("17_4", [JobId(17, 4)], id="J-01"),
        pytest.param("5+1", [JobId(5, None, 1)], id="J-02"),
        pytest.param("17.batch", [JobId(17, step="batch")], id="J-03"),
        pytest.param("4_[2-3%2]", [JobId(4, 2), JobId(4, 3)], id="J-04"),
        pytest.param("4_[0,4-8:2]", [JobId(4, 0), JobId(4, 4), JobId(4, 6), JobId(4, 8)], id="strides"),
        pytest.param("123;cluster", [JobId(123, cluster="cluster")], id="J-05"),
        pytest.param("4227858999", [JobId(4227858999)], id="federated"),
        pytest.param(7, [JobId(7)], id="number"),
    ],
)
def test_parse(text: str | int, ids: list[JobId]) -> None:
    assert list(parse_all(text)) == ids


@pytest.mark.parametrize(
    "text", ["", "abc", "-1", "1_", "1_[", "1_[]", "1_[3-1]", "1_[1-2...]", "1 2", "1;a b", "1_[0-99999999]", "$(x)"]
)
def test_malformed_ids_are_quoted(text: str) -> None:
    with pytest.raises(JobIdError) as error:
        parse_all(text)
    assert text.strip("1_[]") in str(error.value)


def test_spelling_for_commands() -> None:
    assert [str(parse(text)) for text in ("17_4", "5+1", "123;c")] == ["17_4", "5+1", "123"]
    assert parse("123;c").full == "123;c"


def test_several_tasks_are_no_single_job() -> None:
    with pytest.raises(JobIdError, match="2 array tasks"):
        parse("4_[2-3]")


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        pytest.param([State.RUNNING, State.COMPLETED], State.RUNNING, id="J-02-one-runs"),
        pytest.param([State.COMPLETED, State.COMPLETED], State.COMPLETED, id="J-02-all-done"),
        pytest.param([State.COMPLETED, State.FAILED], State.FAILED, id="J-02-one-failed"),
        pytest.param([State.COMPLETED, State.UNKNOWN], State.UNKNOWN, id="J-02-one-unknown"),
        pytest.param([], State.UNKNOWN, id="nothing"),
    ],
)
def test_state_of_all_components(parts: list[State], whole: State) -> None:
    assert together(parts) is whole


def test_j03_step_rows_never_decide() -> None:
    rows = "17|FAILED|1:0\n17.batch|FAILED|1:0\n17.extern|COMPLETED|0:0\n17.0|CANCELLED|0:15\n"
    (record,) = from_sacct(rows)
    assert record.id == JobId(17)
    assert classify(record.words) is State.FAILED


def test_j04_pending_array_row_is_its_tasks() -> None:
    records = from_squeue("4_[2-3%2]|PENDING|JobArrayTaskLimit||PD\n")
    assert [record.id for record in records] == [JobId(4, 2), JobId(4, 3)]
    assert {classify(record.words, record.reason) for record in records} == {State.WAITING}


@pytest.mark.parametrize("stdout", ["", "\n", "sbatch: hello\n", "abc;x", "Submitted batch job\n"])
def test_j06_no_job_id(stdout: str) -> None:
    with pytest.raises(CommandGarbled, match="no job id"):
        sbatch_id(stdout)


def test_job_id_below_chatter() -> None:
    assert sbatch_id("sbatch: your quota is nearly used up\n123;cluster\n") == JobId(123, cluster="cluster")
    assert sbatch_id("Submitted batch job 77 on cluster kestrel\n") == JobId(77, cluster="kestrel")


def test_j08_array_lines_are_tasks() -> None:
    lines = "\n".join(
        f"JobId={job} ArrayJobId=7 ArrayTaskId={task} JobName=a UserId=u(1) JobState=RUNNING Reason=None"
        for job, task in ((7, 3), (12, 2), (11, 1), (10, 0))
    )
    assert [str(record.id) for record in from_scontrol(lines)] == ["7_3", "7_2", "7_1", "7_0"]


# on a real Slurm


def shim(folder: Path, name: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that stands before the real one in PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    if str(folder) not in os.environ["PATH"]:
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH --job-name=run-0a1b2c\n#SBATCH --output=/dev/null\nsleep 60\n")
    return path


@pytest.mark.slurm
def test_j08_real_array(cluster: SlurmBed) -> None:
    job = cluster.submit("sleep 60", "--array=0-3%2")
    wait_for(lambda: cluster.run("squeue", "-h", "-t", "R").count("\n") == 2, "two tasks to run")
    states = {str(task): slurm.job_state(f"{job}_{task}").state for task in range(4)}
    assert states == {"0": State.RUNNING, "1": State.RUNNING, "2": State.WAITING, "3": State.WAITING}
    assert slurm.job_state(job).state is State.RUNNING
    assert slurm.job_state(f"{job}_9").state is State.GONE


@pytest.mark.slurm
def test_j02_real_heterogeneous_job(cluster: SlurmBed) -> None:
    text = cluster.run("sbatch", "--parsable", "--wrap=sleep 60", "-o", "/dev/null", ":", "--wrap=sleep 60")
    job = int(text)
    wait_for(lambda: slurm.job_state(f"{job}+1").state is State.RUNNING, "component 1 to run")
    assert slurm.job_state(job).state is State.RUNNING


@pytest.mark.slurm
def test_j07_lost_answer_found(cluster: SlurmBed, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cluster.run("which", "sbatch").strip()
    shim(tmp_path / "bin", "sbatch", f'{real} "$@" > /dev/null; sleep 60', monkeypatch)
    monkeypatch.setattr(submit, "SBATCH_DEADLINE_S", 1.0)
    job = submit._sbatch(script, "run-0a1b2c")
    assert cluster.run("squeue", "-h", "-t", "all", "-n", "run-0a1b2c", "-o", "%A").split() == [job]


@pytest.mark.slurm
def test_j07_lost_request_sent_once_more(
    cluster: SlurmBed, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = slurm.sbatch(script)  # the run's job of last week, say: the same name, so not to be taken for the new one
    slurm.cancel(earlier)
    monkeypatch.setattr(slurm, "CLOCKS_S", -1.0)
    time.sleep(2)
    real = cluster.run("which", "sbatch").strip()
    once = tmp_path / "once"
    shim(tmp_path / "bin", "sbatch", f'[ -e {once} ] && exec {real} "$@"; touch {once}; sleep 60', monkeypatch)
    monkeypatch.setattr(submit, "SBATCH_DEADLINE_S", 1.0)
    job = submit._sbatch(script, "run-0a1b2c")
    named = cluster.run("squeue", "-h", "-t", "all", "-n", "run-0a1b2c", "-o", "%A").split()
    assert int(job) == max(map(int, named)) and int(job) == int(earlier) + 1


@pytest.mark.slurm
def test_j06_silent_sbatch_is_no_submission(
    cluster: SlurmBed, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim(tmp_path / "bin", "sbatch", "exit 0", monkeypatch)
    with pytest.raises(UserError, match="no job id"):
        slurm.sbatch(script)
