"""Job states, reasons and the order of evidence: acceptance cases S-01 to S-21, on a real Slurm where that is cheap."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from slurmlight.cluster import command, slurm
from slurmlight.cluster.records import from_sacct, from_scontrol, from_squeue, from_squeue_json, from_squeue_row
from slurmlight.cluster.refusals import SubmitRefused, refusal
from slurmlight.cluster.states import ENDED, TABLE, State, classify
from slurmlight.cluster.verdicts import Verdict, from_accounting, from_queue, without_record
from slurmlight.errors import UserError
from tests.slurmbed import SlurmBed, wait_for
from tests.test_cluster_jobid import shim

WORDS = {
    State.WAITING: "PENDING CONFIGURING EXPEDITING REQUEUED REQUEUE_FED",
    State.HELD: "REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
    State.RUNNING: "RUNNING SUSPENDED RESIZING STOPPED SIGNALING",
    State.ENDING: "COMPLETING STAGE_OUT",
    State.COMPLETED: "COMPLETED",
    State.CANCELLED: "CANCELLED REVOKED",
    State.FAILED: "FAILED OUT_OF_MEMORY",
    State.TIMEOUT: "TIMEOUT DEADLINE",
    State.PREEMPTED: "PREEMPTED",
    State.NODE_FAIL: "NODE_FAIL BOOT_FAIL",
}
PAIRS = [(word, state) for state, words in WORDS.items() for word in words.split()]


@pytest.mark.parametrize(("word", "state"), PAIRS, ids=[f"S-01-{word}" for word, _ in PAIRS])
def test_every_word_has_one_class(word: str, state: State) -> None:
    assert classify(word) is state
    assert classify([word]) is state
    assert classify(word.lower().replace("_", " ")) is state
    assert (state is State.COMPLETED) == (word == "COMPLETED")


def test_only_completed_is_completed() -> None:
    assert len(PAIRS) == 25
    assert {word for word, state in TABLE.items() if state is State.COMPLETED} == {"COMPLETED", "CD"}


def queue(text: str) -> Verdict:
    """The verdict on the one job of a scontrol line, or of a squeue row in the kit's format."""
    (record,) = from_scontrol(text) if "JobState=" in text else from_squeue(text)
    return from_queue(record)


def scontrol(**values: object) -> str:
    return "JobId=6 JobName=x UserId=u(1) " + " ".join(f"{key}={value}" for key, value in values.items())


def accounting(text: str, now: float = 0.0) -> Verdict:
    (record,) = from_sacct(text)
    return from_accounting(record, now)


def test_cancelled_names_the_user() -> None:  # S-02
    seen = accounting("17|CANCELLED by 1001|0:0||")
    assert (seen.state, seen.final) == (State.CANCELLED, True)
    assert "1001" in seen.says
    cut = accounting("17|OUT_OF_ME+|0:125||")
    assert (cut.state, cut.final) == (State.FAILED, True)


@pytest.mark.parametrize("word", ["TIMEOUT", "DEADLINE", "TIMEOUT+"], ids="S-03-{}".format)
def test_timeout_is_no_success(word: str) -> None:
    seen = accounting(f"17|{word}|0:0||")
    assert (seen.state, seen.final) == (State.TIMEOUT, True)


@pytest.mark.parametrize("word", ["FOO", "", "COMPLETED FOO", "CO+", "COMPLETE"], ids="S-04-{}".format)
def test_unknown_word(word: str) -> None:
    seen = queue(f"6|{word}|None||??")
    assert (seen.state, seen.final) == (State.UNKNOWN, False)
    assert word in seen.says


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["PENDING", "REQUEUE_HOLD"], State.HELD),
        (["COMPLETED", "COMPLETING"], State.ENDING),
        ("COMPLETED,COMPLETING", State.ENDING),
        (["PREEMPTED", "REQUEUED"], State.WAITING),
        (["COMPLETED", "NEWFLAG"], State.UNKNOWN),
        ([], State.UNKNOWN),
        (["RUNNING", "CONFIGURING"], State.WAITING),
    ],
)
def test_flags(words: str | list[str], state: State) -> None:
    assert classify(words) is state


def test_launch_failed_row() -> None:  # S-05
    (record,) = from_squeue_row("80520_36 gpu align.sh PENDING 0:00 1 (launch failed requeued held)")
    seen = from_queue(record)
    assert (seen.job, seen.state, seen.final) == ("80520_36", State.HELD, False)
    assert "scontrol release 80520_36" in seen.hint and "prolog" in seen.hint and "exclude" in seen.hint


def test_row_with_user_and_code() -> None:
    (record,) = from_squeue_row("             12      a800 run-1-ab     root CG       0:05      1 a800-1")
    assert (record.words, record.nodes) == (("CG",), "a800-1")


HOLDS = {
    "S-06-scontrol": scontrol(Priority=0, JobState="PENDING", Reason="launch_failed_requeued_held", Requeue=1, Restarts=1),
    "S-06-squeue": "6|PENDING|job requeued in held state||PD",
    "S-07-user": "6|PENDING|JobHeldUser||PD",
    "special-exit": "6|SPECIAL_EXIT|JobHeldUser||SE",
    "hold-max-requeue": "6|PENDING|JobHoldMaxRequeue||PD",
    "priority-0": scontrol(Priority=0, JobState="PENDING", Reason="Priority"),
}


@pytest.mark.parametrize("text", HOLDS.values(), ids=HOLDS.keys())
def test_held(text: str) -> None:
    seen = queue(text)
    assert (seen.state, seen.final) == (State.HELD, False)
    assert "scontrol release 6" in seen.hint


def test_held_by_an_administrator() -> None:  # S-07
    seen = queue(scontrol(JobState="PENDING", Reason="JobHeldAdmin"))
    assert seen.state is State.HELD
    assert "only an administrator can release it" in seen.hint


def test_never_starts() -> None:  # S-08
    seen = queue("2|PENDING|DependencyNeverSatisfied||PD|afterok:1(failed)")
    assert (seen.state, seen.final) == (State.BLOCKED, False)
    assert "job 1 " in seen.says
    limit = queue("7|PENDING|PartitionNodeLimit||PD")
    assert limit.state is State.BLOCKED and "node limit" in limit.says


@pytest.mark.parametrize(
    "reason",
    ["Resources", "Priority", "Dependency", "QOSMaxGRESPerUser", "AssocGrpGRES", "ReqNodeNotAvail", "Licenses", "None"],
)
def test_waits(reason: str) -> None:
    assert queue(f"7|PENDING|{reason}||PD").state is State.WAITING


def test_requeue_wait() -> None:  # S-09
    seen = queue(scontrol(Restarts=1, JobState="PENDING", Reason="BeginTime"))
    assert (seen.state, seen.final, seen.attempt) == (State.WAITING, False, 2)
    assert "attempt 2" in seen.says and "2 minutes" in seen.says


def test_completing() -> None:  # S-10
    seen = queue("1|COMPLETING|None|a800-1|CG")
    assert (seen.state, seen.final) == (State.ENDING, False)


def test_last_attempt_wins() -> None:  # S-11
    seen = accounting("17|PREEMPTED|0:0|2026-11-29T18:00:00|a800-1\n17|COMPLETED|0:0|2026-11-29T19:00:00|a800-2\n")
    assert (seen.state, seen.final) == (State.COMPLETED, True)


@pytest.mark.parametrize("word", ["PREEMPTED", "NODE_FAIL"])
def test_absent_for_long_is_final(word: str) -> None:  # S-13
    end = time.mktime(time.strptime("2026-11-29T18:00:00", "%Y-%m-%dT%H:%M:%S"))
    row = f"17|{word}|0:0|2026-11-29T18:00:00|a800-1"
    assert accounting(row, end + 299).final is False
    assert (accounting(row, end + 301).state, accounting(row, end + 301).final) == (State(word.lower()), True)
    assert accounting(f"17|{word}|0:0|Unknown|a800-1", end + 301).final is False


def test_preempted_in_the_queue_comes_back() -> None:
    assert queue("6|PREEMPTED|None||PR").final is False
    assert queue(scontrol(JobState="NODE_FAIL", Reason="NodeDown", Requeue=1)).final is False
    assert queue(scontrol(JobState="NODE_FAIL", Reason="NodeDown", Requeue=0)).final is True


def test_output_folder_cannot_be_written() -> None:  # S-19
    seen = queue(scontrol(JobState="FAILED", Reason="JobLaunchFailure", ExitCode="0:53"))
    assert (seen.state, seen.final) == (State.FAILED, True)
    assert "output folder cannot be written on the node" in seen.says


def test_nobody_knows_the_job() -> None:  # S-15
    assert without_record("6", finished=True).state is State.COMPLETED
    lost = without_record("6", finished=False)
    assert (lost.state, lost.final) == (State.GONE, True) and "lost" in lost.says


def test_values_of_another_field_are_not_taken() -> None:
    line = "JobId=6 JobName=a JobState=COMPLETED b UserId=u(1) JobState=FAILED Reason=None WorkDir=/x JobState=COMPLETED"
    (record,) = from_scontrol(line)
    assert (record.words, record.name) == (("FAILED",), "a JobState=COMPLETED b")


@pytest.mark.parametrize("text", ["hello", "JobId=x JobState=RUNNING", "JobId=6 JobName=x UserId=u(1)", "\x00\xff"])
def test_garbled_scontrol(text: str) -> None:
    with pytest.raises(command.CommandGarbled):
        from_scontrol(text)


@pytest.mark.parametrize("document", [None, {}, {"jobs": 1}, {"jobs": [1]}, {"jobs": [{}]}, {"jobs": [{"job_id": "x"}]}])
def test_garbled_json(document: object) -> None:
    with pytest.raises(command.CommandGarbled):
        from_squeue_json(document)


def test_json_of_newer_slurm() -> None:  # S-17
    job = {
        "job_id": {"set": True, "infinite": False, "number": 9},
        "job_state": ["PENDING", "REQUEUE_HOLD"],
        "exit_code": {"return_code": {"set": True, "number": 76}, "signal": {"id": {"set": False, "number": 0}}},
        "array_job_id": {"set": True, "number": 0},
        "array_task_id": {"set": False, "number": 0},
    }
    old = {"job_id": 9, "job_state": "PENDING", "exit_code": 19456, "array_job_id": 0, "array_task_id": None}
    records = from_squeue_json({"jobs": [job, old]})
    assert [record.exit_code for record in records] == ["76:0", "76:0"]
    assert [str(record.id) for record in records] == ["9", "9"]
    assert [classify(record.words) for record in records] == [State.HELD, State.WAITING]


REFUSALS = {
    "partition": ("sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid partition "
                  "name specified", "a800, urgent"),
    "account": ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", "--account"),
    "time": ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "--time"),
    "gres": ("sbatch: error: Invalid generic resource (gres) specification", "sinfo -o '%P %G'"),
    "nodes": ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "ask for what a node has"),
    "memory": ("sbatch: error: Memory specification can not be satisfied", "--mem"),
    "qos": ("sbatch: error: Batch job submission failed: Invalid qos specification", "--qos"),
    "limit": ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or "
              "time limits)", "limit of your account"),
    "nothing": ("", "no reason given"),
}  # fmt: skip


@pytest.mark.parametrize(("stderr", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusal_says_what_to_change(stderr: str, words: str) -> None:
    error = refusal(stderr, "a800, urgent")
    assert words in str(error) and error.exit_code == 2
    assert "sbatch:" not in str(error)


# on a real Slurm


@pytest.mark.slurm
def test_real_requeue(cluster: SlurmBed) -> None:  # S-09, S-10, R-10
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


@pytest.mark.slurm
def test_real_no_requeue(cluster: SlurmBed) -> None:
    job = cluster.submit("sleep 60", "--no-requeue")
    cluster.wait_job(job, "RUNNING")
    with pytest.raises(UserError, match="--no-requeue"):
        slurm.requeue(job)


@pytest.mark.slurm
def test_real_hold(cluster: SlurmBed) -> None:  # S-06, S-07
    job = cluster.submit("sleep 60", "--hold")
    seen = slurm.job_state(job)
    assert (seen.state, seen.final) == (State.HELD, False)
    slurm.release(job)
    cluster.wait_job(job, "RUNNING")
    cluster.run("scontrol", "requeuehold", str(job))
    wait_for(lambda: slurm.job_state(job).state is State.HELD, "the held state")
    assert slurm.job_state(job).hint == f"scontrol release {job}"


@pytest.mark.slurm
def test_real_blocked(cluster: SlurmBed) -> None:  # S-08
    parent = cluster.submit("exit 3")
    child = cluster.submit("true", f"--dependency=afterok:{parent}")
    big = cluster.submit("true", "-N", "9")
    wait_for(lambda: slurm.job_state(child).state is State.BLOCKED, "the broken dependency")
    assert f"job {parent} " in slurm.job_state(child).says
    wait_for(lambda: slurm.job_state(big).state is State.BLOCKED, "the node limit")


@pytest.mark.slurm
def test_real_unknown_job(cluster: SlurmBed) -> None:  # S-14, S-15
    gone = slurm.job_state(424242)
    assert (gone.state, gone.final) == (State.GONE, True)
    assert gone.notes == (slurm.ACCOUNTING_OFF,)
    assert slurm.job_state(424242, finished=True).state is State.COMPLETED


@pytest.mark.slurm
def test_real_known_and_unknown(cluster: SlurmBed) -> None:  # S-16
    job = cluster.submit("true")
    cluster.wait_job(job, "COMPLETED")
    assert cluster.run("squeue", "-h", "-j", f"424242,{job}") == ""
    assert [slurm.job_state(one).state for one in (424242, job)] == [State.GONE, State.COMPLETED]


@pytest.mark.slurm
def test_real_json_holds_all_jobs(cluster: SlurmBed) -> None:  # S-17
    jobs = [cluster.submit("sleep 60") for _ in range(2)]
    cluster.wait_job(jobs[1], "RUNNING")
    text = cluster.run("squeue", "--json", "-j", str(jobs[1]))
    (mine,) = (record for record in from_squeue_json(json.loads(text)) if record.id.job == jobs[1])
    assert (mine.words, mine.restarts, mine.nodes) == (("RUNNING",), 0, "a800-1")


@pytest.mark.slurm
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


@pytest.mark.slurm
def test_queue_before_accounting(cluster: SlurmBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # S-12
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


@pytest.mark.slurm
def test_real_refusals(cluster: SlurmBed, tmp_path: Path) -> None:  # S-18
    script = tmp_path / "job.sh"
    named = "#!/bin/sh\n#SBATCH -J run-refused\n#SBATCH {}\ntrue\n"
    for option, words in (("-p nope", "a800, urgent"), ("--gres=gpu:a800:8", "node configuration"), ("--time=x", "--time")):
        script.write_text(named.format(option))
        with pytest.raises(SubmitRefused, match=words):
            slurm.sbatch(script)
    assert "FAILED" in cluster.run("squeue", "-h", "-t", "all", "-n", "run-refused", "-o", "%T")
    assert slurm.find_by_name("run-refused") is None


@pytest.mark.slurm
def test_real_output_folder(cluster: SlurmBed) -> None:  # S-19
    job = cluster.submit("true", "--output=/nonexistent/%j.out")
    wait_for(lambda: slurm.job_state(job).final, "its end")
    assert "output folder cannot be written" in slurm.job_state(job).says


@pytest.mark.slurm
def test_real_dependency(cluster: SlurmBed) -> None:  # S-20
    with pytest.raises(UserError, match="999999"):
        slurm.require_parent(999999)
    job = cluster.submit("sleep 60")
    assert slurm.require_parent(job) == str(job)


@pytest.mark.slurm
def test_real_missing_configuration(cluster: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> None:  # S-21
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
    with pytest.raises(command.DeadlineExceeded, match=r"/nonexistent/slurm\.conf"):
        slurm.call("squeue", deadline_s=2)
    assert 0 < command.DEADLINE_S < 60


@pytest.mark.slurm
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


@pytest.mark.slurm
def test_real_controller_stays_down(cluster: SlurmBed) -> None:
    cluster.stop_controller()
    with pytest.raises(slurm.SlurmDown, match="slurmctld is down"):
        slurm.patiently(slurm.partitions, lambda _: None, limit_s=0.1)


@pytest.mark.slurm
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


def test_final_states() -> None:
    assert {State.PREEMPTED, State.NODE_FAIL, State.UNKNOWN, State.HELD, State.BLOCKED}.isdisjoint(ENDED)
