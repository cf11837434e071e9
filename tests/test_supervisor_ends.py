"""What a signal means under Slurm, what the end of a payload means, and what it changes for the next attempt."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from slurmlight.cluster import attempts, ends, outcome, preflight, space
from slurmlight.cluster.attempts import Log
from slurmlight.cluster.decide import End
from slurmlight.cluster.place import _warning
from slurmlight.errors import UserError
from slurmlight.files import read_json, write_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder

NOW = datetime.fromisoformat("2026-11-29T22:55:20").timestamp()
RUNNING = {"JobState": "RUNNING", "Reason": "None", "Restarts": "0", "EndTime": "2026-11-29T23:55:14", "PreemptTime": "None"}
WAKE_UP = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"

# As `scontrol -o show job` of 22.05.8 printed them at the moment of the signal.
SIGNALS = [
    (RUNNING | {"JobState": "COMPLETING"}, False, "cancel", False),
    (RUNNING | {"JobState": "COMPLETING", "Restarts": "1"}, False, "preemption or requeue", True),
    (RUNNING | {"JobState": "PENDING", "Restarts": "1", "Reason": "BeginTime"}, False, "preemption or requeue", True),
    (RUNNING | {"JobState": "COMPLETING", "Reason": "TimeLimit"}, False, "time limit", False),
    (RUNNING | {"PreemptTime": "2026-11-29T22:55:20", "EndTime": "2026-11-29T22:55:25"}, True, "preemption", False),
    (RUNNING | {"PreemptTime": "2026-11-29T22:55:20", "EndTime": "2026-11-29T22:55:25"}, False, "preemption", False),
    (RUNNING | {"EndTime": "2026-11-29T22:58:00"}, True, "time limit", False),
    (RUNNING, True, "signal USR2", False),
    (RUNNING, False, "signal TERM", False),
    ({}, False, "signal TERM", False),
    (RUNNING | {"EndTime": "Unknown"}, True, "signal USR2", False),
]


@pytest.mark.parametrize(("shown", "early", "reason", "coming_back"), SIGNALS)
def test_the_jobs_record_tells_what_a_signal_means(shown: dict[str, str], early: bool, reason: str, coming_back: bool):
    found = _warning(shown, early, restarts=0, lead_s=120, now=NOW)
    assert (found.reason, found.coming_back) == (reason, coming_back)


def test_a_preemption_says_how_long_the_grace_is():
    shown = RUNNING | {"PreemptTime": "2026-11-29T22:55:20", "EndTime": "2026-11-29T22:55:25"}
    assert _warning(shown, False, 0, 120, NOW).seconds == 5


def test_a_requeue_before_this_start_is_an_old_story():
    assert _warning(RUNNING | {"JobState": "COMPLETING", "Restarts": "2"}, False, 2, 120, NOW).reason == "cancel"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    write_json(run.config, {"actor_rollout_ref": {"rollout": {"gpu_memory_utilization": 0.6}}})
    return run


def plan(run: RunFolder) -> JobPlan:
    return JobPlan("x", str(run.path), str(run.path), "local", "x", ("/bin/true",))


def judge(run: RunFolder, code: int, *said: str, hung: str = "", stop_reason: str = "", nodes: tuple[str, ...] = ()) -> End:
    log = Log(run.path / "log.txt", time.time())
    for line in said:
        log.line(line)
    return ends.judge(run, plan(run), log, code=code, hung=hung, stop_reason=stop_reason, nodes=nodes)


def test_only_the_finish_mark_is_finished(run: RunFolder):  # R-05
    assert judge(run, 0).kind == "unfinished"
    run.mark_finished(3, 1)
    assert judge(run, 0).kind == "finished"
    assert judge(run, 1).kind == "finished"


@pytest.mark.parametrize(("code", "kind"), [(75, "stopped"), (2, "bad config"), (1, "crash"), (137, "crash")])
def test_exit_codes(run: RunFolder, code: int, kind: str):
    assert judge(run, code).kind == kind


def test_a_segmentation_fault_hints_at_image_and_host(run: RunFolder):  # R-06
    found = judge(run, 139)
    assert found.kind == "crash" and found.cause == "segmentation fault" and "image and host" in found.action


def test_the_kits_own_words_are_the_cause(run: RunFolder):
    assert judge(run, 2, "loading", "slurmlight: run was saved with 8 GPUs, the job has 4").cause.startswith("run was saved")


def test_a_known_failure_gives_cause_and_action(run: RunFolder):
    found = judge(run, 1, "OSError: [Errno 122] Disk quota exceeded: '/x/latest_checkpointed_iteration.txt'")
    assert found.cause == "quota" and found.hopeless and "free space" in found.action


def test_the_first_cause_is_found_however_much_was_said_after_it(run: RunFolder):
    quota = "OSError: [Errno 122] Disk quota exceeded: '/x/latest_checkpointed_iteration.txt'"
    noise = "\n".join(["x" * 4000] * 2500)  # 10 MB
    assert judge(run, 1, quota, noise, "RuntimeError: NCCL error: unhandled system error").cause == "quota"


def test_nodes_that_ray_lacks_are_named(run: RunFolder):
    lines = ("job 7 on a800-1", "ValueError: Total available GPUs 8.0 is less than total desired GPUs 16")
    action = judge(run, 1, *lines, nodes=("a800-1", "a800-2")).action
    assert "a800-2" in action and "a800-1," not in action


def test_a_wake_up_out_of_memory_lowers_the_share_for_the_next_attempt(run: RunFolder):
    for expected in (0.55, 0.5, 0.45, 0.4, 0.4):
        assert "GPU memory" in judge(run, 1, "=== slurmlight attempt 1 ===", WAKE_UP).cause
        assert read_json(run.path / "adjustments.json") == {SHARE: expected}
    assert "0.6 -> 0.55 from the next attempt on" in (run.path / "log.txt").read_text()
    assert "not lowered further" in (run.path / "log.txt").read_text()


def test_a_hang_is_a_hang_also_when_its_payload_saved_in_the_end(run: RunFolder):
    found = judge(run, 75, hung="no heartbeat")
    assert (found.kind, found.cause, found.failed) == ("hang", "no heartbeat", True)


def wait(run: RunFolder, end: End, sleeps: list[float]) -> End:
    def sleep(seconds: float) -> bool:
        sleeps.append(seconds)
        return len(sleeps) < 3

    return ends.wait_for_space(run, end, Log(run.path / "log.txt", time.time()), sleep)


def test_a_full_disk_is_waited_for(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    answers = ["No space left on device", "No space left on device", ""]
    monkeypatch.setattr(space, "lacking", lambda _: answers.pop(0))
    sleeps: list[float] = []
    found = wait(run, End("crash", cause="disk full", hopeless=True), sleeps)
    assert len(sleeps) == 1 and not found.hopeless


def test_a_disk_that_stays_full_is_left_to_a_person(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(space, "lacking", lambda _: "Disk quota exceeded")
    sleeps: list[float] = []
    found = wait(run, End("crash"), sleeps)
    assert len(sleeps) == 3 and found.hopeless and "Disk quota exceeded" in found.cause and found.action


def test_room_is_found_out_by_taking_it(run: RunFolder):
    assert space.lacking(run) == ""
    assert [path.name for path in run.path.iterdir()] == ["config.json"]
    assert "No such file" in space.lacking(RunFolder(run.path / "nowhere"))


def test_preflight_refuses_a_folder_that_takes_no_file(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    preflight.writable(plan(run), run)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot be written: No space left on device; free space"):
        preflight.writable(plan(run), run)
    assert [path.name for path in run.path.iterdir()] == ["config.json"]


def test_supervisors_that_die_again_and_again_are_given_up(run: RunFolder):
    for number in range(1, 4):
        attempts.begin(run, job="7", node="n", restarts=0, mark=str(number))
        given_up = outcome.give_up(run, "7", "supervisor killed by SIGKILL")
        assert given_up == (number == 3)
    assert (read_json(outcome.path(run)) or {})["state"] == "failed"
    run.add_metrics({"step": 1})
    assert not outcome.give_up(run, "7", "supervisor killed by SIGKILL"), "it did a step"
