"""Slurm's commands on a real Slurm: states, requeue, holds, refusals, outages (acceptance cases S-06 to S-21 and R-10)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from slurmlight.cluster import command, slurm
from slurmlight.cluster.records import from_squeue_json
from slurmlight.cluster.refusals import SubmitRefused
from slurmlight.cluster.states import State
from slurmlight.errors import UserError
from tests.slurmbed import SlurmBed, wait_for
from tests.test_cluster_jobid import shim

pytestmark = pytest.mark.slurm


def test_s09_s10_r10_real_requeue(cluster: SlurmBed) -> None:
    job = cluster.submit("trap '' TERM; echo up; while :; do sleep 0.2; done")
    wait_for(lambda: cluster.output(job), "its first line")
    assert slurm.job_state(job).state is State.RUNNING
    slurm.requeue(job)
    seen = slurm.job_state(job)
    assert (seen.state, seen.final, seen.restarts) == (State.ENDING, False, 1)
    slurm.requeue(job)  # ending already
    wait_for(lambda: slurm.job_state(job).state is State.WAITING, "the requeue wait")
    slurm.requeue(job)  # "Job is pending execution for job 1", exit 1: counts as requeued
    seen = slurm.job_state(job)
    assert (seen.attempt, seen.reason) == (2, "BeginTime")


def test_real_no_requeue(cluster: SlurmBed) -> None:
    job = cluster.submit("sleep 60", "--no-requeue")
    cluster.wait_job(job, "RUNNING")
    with pytest.raises(UserError, match="--no-requeue"):
        slurm.requeue(job)


def test_s06_s07_real_hold(cluster: SlurmBed) -> None:
    job = cluster.submit("sleep 60", "--hold")
    seen = slurm.job_state(job)
    assert (seen.state, seen.final) == (State.HELD, False)
    slurm.release(job)
    cluster.wait_job(job, "RUNNING")
    cluster.run("scontrol", "requeuehold", str(job))
    wait_for(lambda: slurm.job_state(job).state is State.HELD, "the held state")
    assert slurm.job_state(job).hint == f"scontrol release {job}"


def test_s08_real_blocked(cluster: SlurmBed) -> None:
    parent = cluster.submit("exit 3")
    child = cluster.submit("true", f"--dependency=afterok:{parent}")
    big = cluster.submit("true", "-N", "9")
    wait_for(lambda: slurm.job_state(child).state is State.BLOCKED, "the broken dependency")
    assert f"job {parent} " in slurm.job_state(child).says
    wait_for(lambda: slurm.job_state(big).state is State.BLOCKED, "the node limit")


def test_s14_s15_real_unknown_job(cluster: SlurmBed) -> None:
    gone = slurm.job_state(424242)
    assert (gone.state, gone.final) == (State.GONE, True)
    assert gone.notes == (slurm.ACCOUNTING_OFF,)
    assert slurm.job_state(424242, finished=True).state is State.COMPLETED


def test_s16_real_known_and_unknown(cluster: SlurmBed) -> None:
    job = cluster.submit("true")
    cluster.wait_job(job, "COMPLETED")
    assert cluster.run("squeue", "-h", "-j", f"424242,{job}") == ""
    assert [slurm.job_state(one).state for one in (424242, job)] == [State.GONE, State.COMPLETED]


def test_s17_real_json_holds_all_jobs(cluster: SlurmBed) -> None:
    jobs = [cluster.submit("sleep 60") for _ in range(2)]
    cluster.wait_job(jobs[1], "RUNNING")
    text = cluster.run("squeue", "--json", "-j", str(jobs[1]))
    (mine,) = (record for record in from_squeue_json(json.loads(text)) if record.id.job == jobs[1])
    assert (mine.words, mine.restarts, mine.nodes) == (("RUNNING",), 0, "a800-1")


@pytest.mark.parametrize("scontrol", ["exit 127", "echo hello", "echo JobId=1 JobState"], ids=["fails", "chatter", "cut"])
def test_real_without_scontrol(cluster: SlurmBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str) -> None:
    job = cluster.submit("sleep 60")
    cluster.wait_job(job, "RUNNING")
    shim(tmp_path / "bin", "scontrol", scontrol, monkeypatch)
    seen = slurm.job_state(job)
    if scontrol == "exit 127":
        assert (seen.state, seen.final) == (State.UNKNOWN, False)
        return
    assert (seen.state, seen.restarts) == (State.RUNNING, 0)
    shim(tmp_path / "bin", "squeue", f'[ $1 != --json ] && exec {cluster.run("which", "squeue").strip()} "$@"', monkeypatch)
    assert slurm.job_state(job).state is State.RUNNING
    shim(tmp_path / "bin", "squeue", "echo nonsense", monkeypatch)
    assert slurm.job_state(job).state is State.UNKNOWN


def test_s12_queue_before_accounting(cluster: SlurmBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = cluster.submit("sleep 60", "--begin=now+1hour")
    shim(tmp_path / "bin", "sacct", f"echo '{job}|PREEMPTED|0:0|2026-01-01T00:00:00|a800-1'", monkeypatch)
    assert slurm.job_state(job).state is State.WAITING
    shim(tmp_path / "bin", "sacct", "echo '424242|PREEMPTED|0:0|2026-01-01T00:00:00|a800-1'", monkeypatch)
    seen = slurm.job_state(424242)
    assert (seen.state, seen.final, seen.source) == (State.PREEMPTED, True, "accounting")
    shim(tmp_path / "bin", "sacct", "echo '424242|COMPLETED'; echo '424242.0|FAILED'", monkeypatch)
    assert slurm.job_state(424242).state is State.COMPLETED
    shim(tmp_path / "bin", "sacct", "echo nonsense", monkeypatch)
    assert slurm.job_state(424242).state is State.GONE


def test_s18_real_refusals(cluster: SlurmBed, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    named = "#!/bin/sh\n#SBATCH -J run-refused\n#SBATCH {}\ntrue\n"
    for option, words in (("-p nope", "a800, urgent"), ("--gres=gpu:a800:8", "node configuration"), ("--time=x", "--time")):
        script.write_text(named.format(option))
        with pytest.raises(SubmitRefused, match=words):
            slurm.sbatch(script)
    assert "FAILED" in cluster.run("squeue", "-h", "-t", "all", "-n", "run-refused", "-o", "%T")
    assert slurm.find_by_name("run-refused") is None


def test_s19_real_output_folder(cluster: SlurmBed) -> None:
    job = cluster.submit("true", "--output=/nonexistent/%j.out")
    wait_for(lambda: slurm.job_state(job).final, "its end")
    assert "output folder cannot be written" in slurm.job_state(job).says


def test_s20_real_dependency(cluster: SlurmBed) -> None:
    with pytest.raises(UserError, match="999999"):
        slurm.require_parent(999999)
    job = cluster.submit("sleep 60")
    assert slurm.require_parent(job) == str(job)


def test_s21_real_missing_configuration(cluster: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
    with pytest.raises(command.DeadlineExceeded, match=r"/nonexistent/slurm\.conf"):
        slurm.call("squeue", deadline_s=2)
    assert 0 < command.DEADLINE_S < 60


def test_real_controller_down(cluster: SlurmBed) -> None:
    job = cluster.submit("sleep 60")
    cluster.wait_job(job, "RUNNING")
    cluster.stop_controller()
    seen = slurm.job_state(job)
    assert (seen.state, seen.final) == (State.UNKNOWN, False)
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        cluster.start_controller()

    assert slurm.patiently(slurm.partitions, tell) == ("a800", "urgent")
    assert "next try in" in told[0]
    wait_for(lambda: slurm.job_state(job).state is State.RUNNING, "the job to be seen again")


def test_real_controller_stays_down(cluster: SlurmBed) -> None:
    cluster.stop_controller()
    with pytest.raises(slurm.SlurmDown, match="slurmctld is down"):
        slurm.patiently(slurm.partitions, lambda _: None, limit_s=0.1)


def test_environment_does_not_change_answers(cluster: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%j")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "%s")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    env = command.clean_environment()
    assert {"SQUEUE_FORMAT", "SLURM_TIME_FORMAT", "SLURM_JOB_ID"} & set(env) == set()
    assert (env["LC_ALL"], env["SLURM_CONF"]) == ("C", os.environ["SLURM_CONF"])
    job = cluster.submit("sleep 60", "-J", "named")
    assert slurm.find_by_name("named", time.time() - 5) == str(job)
