"""What follows the end of an attempt: a table of ends and histories."""

from __future__ import annotations

from slurmlight.cluster.decide import Decision, End, decide


def crash(step: int, made_step: bool = True, complete_step: int = 10, **more: object) -> End:
    return End("crash", step=step, made_step=made_step, complete_step=complete_step, exit_code=1, **more)  # type: ignore[arg-type]


def verdict(end: End, *history: End, restarts: int | None = None, cap: int = 5, requeue: bool = True) -> Decision:
    return decide(end, history, restarts=len(history) if restarts is None else restarts, cap=cap, requeue=requeue)


def test_a_finished_run_is_done_whatever_happened_before():
    assert verdict(End("finished"), crash(3), restarts=50).verdict == "done"
    assert verdict(End("finished", stop_reason="preemption")).verdict == "done"


def test_cap_counts_requeues():
    assert verdict(crash(12), restarts=4).verdict == "requeue"
    found = verdict(crash(12), restarts=5)
    assert found.verdict == "stop" and "cap reached" in found.why


def test_preemptions_do_not_use_up_the_cap():
    preempted = End("stopped", step=5, made_step=True, complete_step=5, stop_reason="preemption")
    assert verdict(crash(12), *[preempted] * 20, restarts=20, cap=1).verdict == "requeue"
    assert verdict(preempted, *[preempted] * 200, restarts=200, cap=1).verdict == "requeue"


def test_three_failures_at_the_same_step_are_a_crash_loop():
    assert verdict(crash(12), crash(12)).verdict == "requeue"
    found = verdict(crash(12, cause="NCCL timeout"), crash(12), crash(12))
    assert found.verdict == "stop" and "crash loop" in found.why and "NCCL timeout" in found.why and found.action


def test_a_new_checkpoint_in_between_is_progress():
    assert verdict(crash(12, complete_step=11), crash(12), crash(12)).verdict == "requeue"


def test_failures_at_later_steps_are_progress():
    assert verdict(crash(25), crash(12), crash(18)).verdict == "requeue"


def test_failures_that_do_not_get_further_are_a_loop_also_at_different_steps():
    assert verdict(crash(11), crash(12), crash(10)).verdict == "stop"


def test_two_attempts_in_a_row_without_a_step_are_a_crash_loop():
    barren = crash(0, made_step=False, complete_step=0)
    assert verdict(barren).verdict == "requeue"
    assert "two attempts in a row made no step" in verdict(barren, barren).why
    assert verdict(barren, crash(3)).verdict == "requeue"
    hang = End("hang", cause="no first step")
    assert verdict(hang, barren).verdict == "stop"


def test_a_time_limit_too_short_for_one_step_ends():
    short = End("stopped", stop_reason="time limit", complete_step=4, step=4)
    assert verdict(short).verdict == "requeue"
    assert verdict(short, short).verdict == "stop"


def test_preemptions_before_the_first_step_are_no_crash_loop():
    early = End("stopped", stop_reason="preemption")
    assert verdict(early, early, early).verdict == "requeue"
    barren = crash(0, made_step=False, complete_step=0)
    assert verdict(barren, barren, early).verdict == "stop", "and they do not hide one"


def test_a_stop_of_ones_own_is_not_repeated_for_ever():
    strange = End("stopped", exit_code=75)
    assert verdict(strange).verdict == "requeue"
    assert verdict(strange, strange).verdict == "stop"


def test_exit_0_without_the_finish_mark_is_a_failure():
    found = verdict(End("unfinished", step=3, made_step=True, exit_code=0))
    assert found.verdict == "requeue" and "finish mark" in found.why


def test_a_payload_that_dies_while_it_was_asked_to_stop_comes_back():
    assert verdict(End("crash", step=3, exit_code=143, stop_reason="preemption"), cap=0).verdict == "requeue"


def test_a_refused_configuration_is_not_tried_again():
    found = verdict(End("bad config", cause="unknown key 'x'", action="remove it"))
    assert (found.verdict, found.why, found.action) == ("stop", "unknown key 'x'", "remove it")


def test_a_person_who_stops_the_run_means_it():
    for reason in ("cancel", "interrupt", "launcher gone"):
        assert verdict(End("stopped", stop_reason=reason)).verdict == "stop"
        assert verdict(End("crash", exit_code=143, stop_reason=reason)).verdict == "stop"


def test_a_hopeless_cause_is_not_tried_again():
    found = verdict(crash(12, cause="disk quota exceeded", action="free space", hopeless=True))
    assert (found.verdict, found.why, found.action) == ("stop", "disk quota exceeded", "free space")


def test_requeue_off():
    assert verdict(crash(12), requeue=False).verdict == "stop"
    assert verdict(End("stopped", stop_reason="time limit", made_step=True), requeue=False).verdict == "stop"


def test_three_nodes_are_tried():
    bad = End("bad node", cause="GPU 3 is occupied")
    assert verdict(bad).verdict == verdict(bad, bad).verdict == "requeue"
    assert verdict(bad, bad, bad).verdict == "stop"


def test_lost_nodes_do_not_break_the_row_of_failures():
    lost = End("lost")
    barren = crash(0, made_step=False, complete_step=0)
    assert verdict(barren, barren, lost).verdict == "stop"
