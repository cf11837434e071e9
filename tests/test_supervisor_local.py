"""A run's life on this machine, with real processes: what happens to payload, supervisor and launcher, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from slurmlight.cluster import processes
from slurmlight.runfolder import RunFolder
from tests import runs
from tests.steps_payload import weights_after, weights_of


def marked(run: RunFolder) -> list[int]:
    """Processes of the run's payloads that are alive."""
    return processes.marked(record.mark for record in runs.records(run))


def assert_finished(run: RunFolder, steps: int) -> None:
    assert runs.outcome(run)["state"] == "finished"
    assert weights_of(run.path, steps) == weights_after(steps)
    assert not marked(run)


def test_a_run_finishes_and_the_next_start_does_nothing(tmp_path: Path):
    run = runs.make_run(tmp_path, steps=3)
    assert runs.finish(run)[0] == 0
    assert_finished(run, 3)
    code, said = runs.finish(run)
    assert code == 0 and "nothing to do" in said and run.attempt_numbers() == [1]


def test_a_killed_payload_and_a_killed_supervisor_cost_only_steps(tmp_path: Path):
    run = runs.make_run(tmp_path, steps=8, save_freq=3)
    runs.add_fault(run, 3, "os.kill(os.getpid(), signal.SIGKILL)", attempt=1)
    runs.add_fault(run, 5, "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)", attempt=2)
    runs.add_fault(run, 8, "sys.exit(0)", attempt=3)
    assert runs.finish(run)[0] == 0
    assert_finished(run, 8)
    assert [record.kind for record in runs.records(run)] == ["crash", "lost", "unfinished", "finished"]
    assert [record.first_step for record in runs.records(run)] == [1, 1, 4, 7]
    assert "supervisor killed by SIGKILL" in runs.log(run)


def test_a_stopped_payload_is_found_hung_saved_and_started_again(tmp_path: Path):
    run = runs.make_run(tmp_path, steps=4, save_freq=4, step_s=2)
    runs.add_fault(run, 3, "os.kill(os.getpid(), signal.SIGSTOP)", attempt=1)
    assert runs.finish(run)[0] == 0
    assert_finished(run, 4)
    first, second = runs.records(run)
    assert first.kind == "hang" and first.cause == "no heartbeat" and second.first_step == 4, "it saved when it could go on"
    assert 'steps_payload.py", line' in runs.log(run), "stacks are in the log"


def test_a_payload_that_never_steps_is_ended_and_after_two_times_left_to_a_person(tmp_path: Path):
    run = runs.make_run(tmp_path, first_step_s=1)
    runs.add_fault(run, 1, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    patience = 90  # each of the two gets its ten seconds to save
    assert runs.finish(run, patience)[0] == 1
    assert "two attempts in a row made no step (no first step)" in runs.outcome(run)["cause"]
    assert not marked(run)


def test_interrupt_saves_and_the_same_start_goes_on(tmp_path: Path):
    run = runs.make_run(tmp_path, steps=20, save_freq=50)
    with runs.supervised(run) as process:
        runs.wait_for(lambda: runs.step(run) >= 3, "step 3")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert len(said.splitlines()) == 1 and "stopped at step" in said and "launch the same run again" in said
    assert runs.outcome(run)["state"] == "stopped"
    assert runs.finish(run)[0] == 0
    assert_finished(run, 20)
    first, second = runs.records(run)
    assert first.last_step is not None and second.first_step == first.last_step + 1


def test_a_second_interrupt_ends_at_once(tmp_path: Path):
    run = runs.make_run(tmp_path, steps=2, seconds=120)
    with runs.supervised(run) as process:
        runs.wait_for(lambda: runs.step(run) >= 0, "the first beat")
        process.send_signal(signal.SIGINT)
        time.sleep(0.8)
        assert process.poll() is None, "the first one waits for the step"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130 and not marked(run)


def test_a_run_does_not_outlive_its_launcher_or_its_guard(tmp_path: Path):
    for name in ("launcher", "guard"):
        run = runs.make_run(tmp_path, name, steps=1000)
        launcher = subprocess.Popen(["sleep", "600"])
        with runs.supervised(run, SLURMLIGHT_LAUNCHER=str(launcher.pid)) as process:
            runs.wait_for(lambda run=run: runs.step(run) >= 1, "step 1")
            (launcher if name == "launcher" else process).kill()
            launcher.wait() if name == "launcher" else process.wait()
            runs.wait_for(lambda run=run: runs.outcome(run).get("state") == "stopped", "the stop")
            assert not marked(run)
        launcher.kill()
        launcher.wait()
        assert runs.records(run)[0].complete_step > 0, "it saved"


def test_one_supervisor_a_run(tmp_path: Path):
    run = runs.make_run(tmp_path, steps=1000)
    with runs.supervised(run):
        runs.wait_for(lambda: runs.step(run) >= 1, "step 1")
        code, said = runs.finish(run)
        assert code == 2 and "is running already" in said and "logs -f demo" in said
        assert run.attempt_numbers() == [1]


def test_temporary_files_of_a_killed_payload_go_with_its_attempt(tmp_path: Path):
    run = runs.make_run(tmp_path)
    leave = f"import tempfile; open({str(tmp_path)!r} + '/where', 'w').write(tempfile.mkdtemp()); os.kill(os.getpid(), 9)"
    runs.add_fault(run, 3, leave, attempt=1)
    code, said = runs.finish(run)
    assert code == 0, said
    left = Path((tmp_path / "where").read_text())
    assert left.parent.name.startswith("sl-") and not left.parent.exists()


def test_compiled_kernels_are_there_for_the_next_attempt_and_go_with_the_job(tmp_path: Path):
    run = runs.make_run(tmp_path, gpus=1)
    kernel, told = "Path(os.environ['VLLM_CACHE_ROOT'], 'kernel')", f"open({str(tmp_path)!r} + '/told', 'w').write"
    runs.add_fault(run, 3, f"{kernel}.write_text('x'); os.kill(os.getpid(), 9)", attempt=1)
    runs.add_fault(run, 4, f"{told}({kernel}.read_text() + ' ' + str({kernel}))", attempt=2)
    code, said = runs.finish(run)
    assert code == 0, said
    word, _, place = (tmp_path / "told").read_text().partition(" ")
    job = Path(place).parents[2]
    assert word == "x" and job.name.startswith(f"slurmlight-{os.getuid()}-local-") and not job.exists()


def test_temporary_files_and_caches_are_in_the_scratch_folder_of_the_profile(tmp_path: Path):
    scratch = tmp_path / "local"
    run = runs.make_run(tmp_path, gpus=1, scratch=str(scratch))
    code, said = runs.finish(run)
    assert code == 1 and f"scratch folder {scratch} cannot be written on this node" in said + runs.log(run)
    scratch.mkdir()
    told = f"open({str(tmp_path)!r} + '/told', 'w').write"
    runs.add_fault(run, 2, f"{told}(os.environ['TMPDIR'] + ' ' + os.environ['VLLM_CACHE_ROOT'])")
    code, said = runs.finish(run)
    assert code == 0, said
    assert all(Path(place).is_relative_to(scratch) for place in (tmp_path / "told").read_text().split())
    assert not list(scratch.iterdir()), "both go with the job"


def test_processes_that_a_payload_left_behind_are_ended(tmp_path: Path):
    run = runs.make_run(tmp_path, steps=4)
    stray = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    runs.add_fault(run, 1, stray)
    runs.add_fault(run, 2, f"{stray}; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)", attempt=1)
    foreign = subprocess.Popen(["sleep", "600"], env=os.environ | {processes.MARK: "another"})
    try:
        assert runs.finish(run)[0] == 0
        assert_finished(run, 4)
        assert "[orphans]" in runs.log(run)
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_a_crash_loop_stops_and_leaves_everything(tmp_path: Path):
    run = runs.make_run(tmp_path, steps=9, save_freq=2, seconds=0.02)
    runs.add_fault(run, 4, "raise ValueError('no such column')")
    code, said = runs.finish(run)
    assert code == 1 and "crash loop" in said and len(said.splitlines()) == 1
    assert [record.kind for record in runs.records(run)] == ["crash"] * 3
    assert run.attempt_numbers() == [1, 2, 3] and weights_of(run.path, 2) == weights_after(2)
    (run.path / "faults.jsonl").unlink()
    assert runs.finish(run)[0] == 0, "a person who launches again starts with a clean slate"
    assert_finished(run, 9)


def test_a_refused_configuration_is_not_tried_again(tmp_path: Path):
    run = runs.make_run(tmp_path)
    runs.add_fault(run, 1, "sys.exit(2)")
    assert runs.finish(run)[0] == 2
    assert run.attempt_numbers() == [1] and runs.outcome(run)["state"] == "failed"


def test_a_stop_while_saving_lets_the_save_complete(tmp_path: Path):
    run = runs.make_run(tmp_path, steps=9, save_freq=1)
    runs.add_fault(run, 2, "os.kill(os.getppid(), signal.SIGINT); time.sleep(1)", attempt=1)
    assert runs.finish(run)[0] == 75
    assert runs.records(run)[0].complete_step == 2
    assert runs.finish(run)[0] == 0
    assert_finished(run, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"payload": ("/nowhere/python", "x")}, "/nowhere/python does not exist on this node"),
        ({"project_folder": "/nowhere"}, "project folder /nowhere does not exist"),
    ],
)
def test_a_payload_that_cannot_start_names_the_reason(tmp_path: Path, change: dict[str, object], words: str):
    run = runs.make_run(tmp_path, **change)
    code, said = runs.finish(run)
    assert code == 1 and words in said and "Traceback" not in said


@pytest.mark.parametrize("name", ["lock", "owner.json"])
def test_a_run_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path, name: str):
    run = runs.make_run(tmp_path)
    (run.path / name / "in the way").mkdir(parents=True)
    code, said = runs.finish(run)
    assert code == 1 and len(said.splitlines()) == 1 and "launch again" in said


@pytest.mark.parametrize("text", ["", '{"name": ', "[]", "{}", '{"name": "x"}'])
def test_a_torn_or_foreign_plan_is_one_clear_line(tmp_path: Path, text: str):
    run = runs.make_run(tmp_path)
    run.plan.write_text(text)
    code, said = runs.finish(run)
    assert code == 2 and len(said.splitlines()) == 1 and "launch the run again" in said
