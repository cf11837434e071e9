"""Records of attempts: opening, closing those that could not, lost steps; and the heartbeat watchdog."""

from __future__ import annotations

from pathlib import Path

from slurmlight.cluster import attempts
from slurmlight.cluster.watch import NO_FIRST_STEP, NO_HEARTBEAT, Watchdog
from slurmlight.runfolder import RunFolder, Status


def begin(run: RunFolder, job: str = "1") -> attempts.Attempt:
    return attempts.begin(run, job=job, node="n1", restarts=0, mark="m")[0]


def steps(run: RunFolder, *numbers: int) -> None:
    for number in numbers:
        run.add_metrics({"step": number})


def test_attempts_are_numbered_logged_and_linked(tmp_path: Path):
    run = RunFolder(tmp_path)
    assert [begin(run).attempt, begin(run).attempt] == [1, 2]
    assert (run.attempts / "latest").resolve() == run.attempt(2)
    assert attempts.log_path(run, 2).read_text().splitlines()[0] == "=== slurmlight attempt 2 ==="
    assert [one.attempt for one in attempts.load(run)] == [1, 2]


def test_foreign_and_torn_records_are_left_out(tmp_path: Path):
    run = RunFolder(tmp_path)
    begin(run)
    for number, text in ((2, '{"attempt": 2, "jo'), (3, "[]"), (4, '{"attempt": 4}'), (5, "")):
        run.attempt(number).mkdir()
        attempts.record_path(run, number).write_text(text)
    (run.attempts / "notes").mkdir()
    assert [one.attempt for one in attempts.load(run)] == [1]
    assert begin(run).attempt == 6


def test_an_attempt_knows_its_steps(tmp_path: Path):
    run = RunFolder(tmp_path)
    steps(run, 0, 1, 2)
    one = begin(run)
    steps(run, 3, 4)
    run.metrics.open("a").write('{"step": 5, "torn')
    run.tracker.write_text("4")
    closed = attempts.close(run, one, kind="crash")
    assert (closed.first_step, closed.last_step, closed.steps, closed.complete_step, closed.kind) == (3, 4, 2, 4, "crash")


def test_lost_attempts_are_closed_as_of_their_last_sign_of_life(tmp_path: Path):
    run = RunFolder(tmp_path)
    begin(run)
    steps(run, 1, 2, 3)
    run.beat(Status(3, 9, "rollout", 1, time=5e9))
    begin(run)
    steps(run, 3, 4)
    first, second = attempts.close_lost(run, attempts.load(run))
    assert (first.kind, first.ended, first.first_step, first.last_step) == (attempts.LOST, 5e9, 1, 3)
    assert (second.first_step, second.last_step) == (3, 4)


def test_lost_steps_are_those_done_again(tmp_path: Path):
    run = RunFolder(tmp_path)
    for numbers in ((1, 2, 3, 4, 5), (), (4, 5, 6, 7), (8, 9)):
        begin(run)
        steps(run, *numbers)
    known = attempts.close_lost(run, attempts.load(run))
    assert attempts.lost_steps(known) == [2, 0, 0, 0]
    assert attempts.lost_steps(known, resumes_from=8) == [2, 0, 0, 1]


def test_steps_lost_twice_count_once_an_attempt(tmp_path: Path):
    run = RunFolder(tmp_path)
    for numbers in ((1, 2, 3), (3, 4, 5), (3, 4)):
        begin(run)
        steps(run, *numbers)
    assert attempts.lost_steps(attempts.close_lost(run, attempts.load(run))) == [1, 3, 0]


def watchdog() -> Watchdog:
    return Watchdog(attempt=2, first_step_s=100, step_s=10, started=1000)


def beat(step: int, phase: str = "rollout", attempt: int = 2, time: float = 0) -> Status:
    return Status(step, 9, phase, attempt, time)


def look_on(dog: Watchdog, status: Status | None, grew: bool, until: float) -> str:
    """Looks every ten seconds up to ``until``: the last answer."""
    answer = ""
    while dog.looked < until:
        answer = dog.look(status, grew, min(until, dog.looked + 10))
    return answer


def test_the_first_step_has_its_own_deadline():
    dog = watchdog()
    assert look_on(dog, None, False, 1099) == ""
    assert dog.look(beat(0, "load"), False, 1101) == NO_FIRST_STEP


def test_a_suspended_job_is_not_hung():
    dog = watchdog()
    assert dog.look(beat(1), True, 1001) == ""
    assert dog.look(beat(1), True, 5000) == "", "its supervisor slept as well"
    assert look_on(dog, beat(1), True, 5012) == NO_HEARTBEAT
    assert watchdog().look(None, False, 9999) == ""


def test_later_beats_must_keep_coming():
    dog = watchdog()
    assert look_on(dog, beat(1), True, 1009) == ""
    assert dog.look(beat(1), True, 1021) == NO_HEARTBEAT
    assert dog.look(beat(1, "save"), True, 1022) == ""


def test_an_old_attempts_beat_is_no_sign_of_life():
    dog = watchdog()
    assert dog.look(beat(1), True, 1000) == ""
    assert dog.look(beat(7, attempt=1), True, 1011) == NO_HEARTBEAT


def test_the_payloads_clock_does_not_matter():
    dog = watchdog()
    assert dog.look(beat(1, time=5e9), True, 1000) == ""
    assert dog.look(beat(1, time=5e9), True, 1011) == NO_HEARTBEAT


def test_seconds_are_added_up_by_phase():
    dog = watchdog()
    dog.look(beat(0, "load"), False, 1005)
    dog.look(beat(1, "rollout"), True, 1025)
    dog.look(beat(1, "rollout"), True, 1030)
    assert dog.phases == {"start": 5, "load": 20, "rollout": 5}
