"""Job states, reasons and the order of evidence: acceptance cases S-01 to S-21, on a real Slurm where that is cheap."""

from __future__ import annotations

import time

import pytest

from slurmlight.cluster import command
from slurmlight.cluster.records import from_sacct, from_scontrol, from_squeue, from_squeue_json, from_squeue_row
from slurmlight.cluster.refusals import refusal
from slurmlight.cluster.states import ENDED, TABLE, State, classify
from slurmlight.cluster.verdicts import Verdict, from_accounting, from_queue, without_record

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


def test_s02_cancelled_names_the_user() -> None:
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


def test_s05_launch_failed_row() -> None:
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


def test_s07_held_by_an_administrator() -> None:
    seen = queue(scontrol(JobState="PENDING", Reason="JobHeldAdmin"))
    assert seen.state is State.HELD
    assert "only an administrator can release it" in seen.hint


def test_s08_never_starts() -> None:
    seen = queue("2|PENDING|DependencyNeverSatisfied||PD|afterok:1(failed)")
    assert (seen.state, seen.final) == (State.BLOCKED, False)
    assert "job 1 " in seen.says
    seen = queue("2|CANCELLED|DependencyNeverSatisfied||CA|afterok:1(failed)")  # with --kill-on-invalid-dep
    assert (seen.state, seen.final) == (State.CANCELLED, True) and "job 1 did not end as asked" in seen.says
    limit = queue("7|PENDING|PartitionNodeLimit||PD")
    assert limit.state is State.BLOCKED and "node limit" in limit.says


@pytest.mark.parametrize(
    "reason",
    ["Resources", "Priority", "Dependency", "QOSMaxGRESPerUser", "AssocGrpGRES", "ReqNodeNotAvail", "Licenses", "None"],
)
def test_waits(reason: str) -> None:
    assert queue(f"7|PENDING|{reason}||PD").state is State.WAITING


def test_s09_requeue_wait() -> None:
    seen = queue(scontrol(Restarts=1, JobState="PENDING", Reason="BeginTime"))
    assert (seen.state, seen.final, seen.attempt) == (State.WAITING, False, 2)
    assert "attempt 2" in seen.says and "2 minutes" in seen.says


def test_s10_completing() -> None:
    seen = queue("1|COMPLETING|None|a800-1|CG")
    assert (seen.state, seen.final) == (State.ENDING, False)


def test_s11_last_attempt_wins() -> None:
    seen = accounting("17|PREEMPTED|0:0|2026-11-29T18:00:00|a800-1\n17|COMPLETED|0:0|2026-11-29T19:00:00|a800-2\n")
    assert (seen.state, seen.final) == (State.COMPLETED, True)


@pytest.mark.parametrize("word", ["PREEMPTED", "NODE_FAIL"])
def test_s13_absent_for_long_is_final(word: str) -> None:
    end = time.mktime(time.strptime("2026-11-29T18:00:00", "%Y-%m-%dT%H:%M:%S"))
    row = f"17|{word}|0:0|2026-11-29T18:00:00|a800-1"
    assert accounting(row, end + 299).final is False
    assert (accounting(row, end + 301).state, accounting(row, end + 301).final) == (State(word.lower()), True)
    assert accounting(f"17|{word}|0:0|Unknown|a800-1", end + 301).final is False


def test_preempted_in_the_queue_comes_back() -> None:
    assert queue("6|PREEMPTED|None||PR").final is False
    assert queue(scontrol(JobState="NODE_FAIL", Reason="NodeDown", Requeue=1)).final is False
    assert queue(scontrol(JobState="NODE_FAIL", Reason="NodeDown", Requeue=0)).final is True


def test_s19_output_folder_cannot_be_written() -> None:
    seen = queue(scontrol(JobState="FAILED", Reason="JobLaunchFailure", ExitCode="0:53"))
    assert (seen.state, seen.final) == (State.FAILED, True)
    assert "output folder cannot be written on the node" in seen.says


def test_s15_nobody_knows_the_job() -> None:
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


def test_s17_json_of_newer_slurm() -> None:
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


def test_final_states() -> None:
    assert {State.PREEMPTED, State.NODE_FAIL, State.UNKNOWN, State.HELD, State.BLOCKED}.isdisjoint(ENDED)
