"""slurmlight status, logs, cancel, report on runs of this machine: living, ended, lost, torn and foreign ones."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slurmlight import evaluating
from slurmlight.cli import build
from slurmlight.cluster import slurm
from slurmlight.cluster.states import State
from slurmlight.cluster.verdicts import Verdict
from slurmlight.errors import UserError
from slurmlight.files import write_json
from slurmlight.runfolder import RunFolder, Status
from tests import runs

KEYS = {"run", "job", "node", "state", "step", "total_steps", "attempts", "restarts", "lost_steps", "cause"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def call(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(build(), arguments)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def seen(name: str) -> dict:
    return json.loads(call("status", name, "--json"))


def test_a_finished_run_with_a_crash_in_it(home: Path):
    run = runs.make_run(home, steps=6, save_freq=2)
    runs.add_fault(run, 4, "os.kill(os.getpid(), signal.SIGKILL)", attempt=1)
    assert runs.finish(run)[0] == 0
    view = seen("demo")
    assert view.keys() >= KEYS
    facts = {key: view[key] for key in ("run", "state", "step", "total_steps", "attempts", "restarts", "lost_steps", "cause")}
    assert facts == {
        "run": "demo", "state": "finished", "step": 6, "total_steps": 6, "attempts": 2, "restarts": 1, "lost_steps": 1, "cause": "",
    }  # fmt: skip
    report = json.loads(call("report", "demo", "--json"))
    assert report.keys() >= KEYS and report["lost_steps"] == 1
    assert [(entry["first_step"], entry["last_step"], entry["lost_steps"]) for entry in report["history"]] == [
        (1, 3, 1),
        (3, 6, 0),
    ]
    assert "exit code 137" in report["history"][0]["reason"]
    assert 0 < report["goodput"] <= 1 and sum(report["phases"].values()) > 0
    text = call("report", "demo")
    assert "goodput" in text and "1 steps lost" in text and "1-3" in text
    assert "finished" in call("status") and "6/6" in call("status")
    lines = call("logs", "demo").splitlines()
    assert [line for line in lines if line.startswith("===")] == [f"=== slurmlight attempt {n} ===" for n in (1, 2)]


@pytest.mark.parametrize(
    "fault",
    [
        "print('slurmlight: the hub refuses q7Zk3LmP0aXw', flush=True); sys.exit(2)",
        "raise RuntimeError('the hub refuses q7Zk3LmP0aXw')",
    ],
    ids=["said", "raised"],
)
def test_a_secret_in_a_log_is_shown_and_recorded_nowhere(home: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    secret = "q7Zk3LmP0aXw"
    monkeypatch.setenv("MY_API_KEY", secret)
    run = runs.make_run(home, requeue=False)
    runs.add_fault(run, 1, fault)
    _, said = runs.finish(run)
    log = run.attempt(1) / "log.txt"
    assert secret in log.read_text(), "what the payload wrote itself stays as it is"
    monkeypatch.delenv("MY_API_KEY")  # whoever reads the records need not know it
    kept = [path.read_text() for path in (run.path / "outcome.json", run.attempt(1) / "attempt.json")]
    kept += [call("status", "demo"), call("report", "demo"), call("report", "demo", "--json"), call("status", "--json")]
    monkeypatch.setenv("MY_API_KEY", secret)
    logs, explained = call("logs", "demo"), [call("explain", str(log)), call("explain", str(log), "--json")]
    assert not [text for text in [said, logs, *kept, *explained] if secret in text]
    assert "the hub refuses ***" in logs
    assert "the hub refuses ***" in (explained[0] if "raise" in fault else kept[0])


def test_a_living_run_is_followed_and_cancelled(home: Path):
    run = runs.make_run(home, steps=10_000, save_freq=50)
    with runs.supervised(run) as process:
        runs.wait_for(lambda: runs.step(run) >= 2, "step 2")
        view = seen("demo")
        assert view["state"] == "running" and view["eta_s"] > 0 and view["total_steps"] == 10_000
        command = [sys.executable, "-c", "from slurmlight.cli import main; main()", "logs", "-f", "demo"]
        follower = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert "stop" in call("cancel", "demo")
        assert process.wait(30) == 75
        said, _ = follower.communicate(timeout=30)
        assert follower.returncode == 75 and "payload stopped at step" in said
    view = seen("demo")
    assert view["state"] == "stopped" and "cancel" in view["cause"] and "launch the same run again" in view["action"]
    assert view["lost_steps"] == 0
    with pytest.raises(UserError, match="no job to cancel"):
        call("cancel", "demo")


def test_cancel_now_does_not_wait_for_the_step(home: Path):
    run = runs.make_run(home, steps=2, seconds=300)
    with runs.supervised(run) as process:
        runs.wait_for(lambda: runs.step(run) >= 0, "the first beat")
        assert "stopped" in call("cancel", "demo", "--now")
        assert process.wait(30) == 130


def test_a_recycled_pid_is_never_hit(home: Path):
    run = runs.make_run(home)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        write_json(run.path / "owner.json", {"job": "local-1-1", "node": os.uname().nodename, "pid": bystander.pid, "start": 1})
        with pytest.raises(UserError):
            call("cancel", "demo")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_crash_loop_names_cause_and_action(home: Path):
    run = runs.make_run(home, steps=4, seconds=0.02)
    runs.add_fault(run, 1, "raise ValueError('no such table: singer')")
    assert runs.finish(run)[0] == 1
    view = seen("demo")
    assert view["state"] == "failed" and "crash loop" in view["cause"] and view["action"]
    assert "crash loop" in call("status")


def test_a_run_whose_machine_went_down_is_lost(home: Path):
    run = runs.make_run(home, steps=10_000, save_freq=3)
    with runs.supervised(run) as process:
        runs.wait_for(lambda: runs.step(run) >= 4, "step 4")
        attempt = runs.records(run)[0]
        os.kill(process.pid, 19)  # so that the guard cannot start another one
        os.kill(attempt.pid, 9)
        process.kill()
        process.wait()
    view = seen("demo")
    assert view["state"] == "lost" and "launch the same run again" in view["action"] and view["lost_steps"] > 0
    assert json.loads(call("report", "demo", "--json"))["history"][0]["ended"] == "lost"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"x"', "null", '{"step": 3}', '{"cluster": "slurm"}', '{"cluster": "slurm", "job_id": "x y"}']
)
def test_torn_and_foreign_folders_are_shown_all_the_same(home: Path, text: str):
    run = runs.make_run(home)
    run.attempt(1).mkdir(parents=True)
    for path in (
        run.job,
        run.path / "status.json",
        run.path / "outcome.json",
        run.attempt(1) / "attempt.json",
        run.metrics,
        run.tracker,
    ):
        path.write_text(text)
    for name in ("owner.json", "stop.json"):
        (run.path / name).write_text(text)
    assert seen("demo").keys() >= KEYS
    call("status")
    call("report", "demo")
    call("logs", "demo")
    json.loads(call("report", "demo", "--json"))


@pytest.mark.parametrize("name", ["job.json", "outcome.json", "attempts/001/attempt.json", "finished.json"])
def test_one_file_that_cannot_be_read_does_not_hide_the_other_runs(home: Path, name: str):
    runs.make_run(home, "good")
    broken = runs.make_run(home, "broken")
    (broken.path / name).mkdir(parents=True)  # like a file of somebody else's, for root too
    views = {view["run"]: view for view in json.loads(call("status", "--json"))}
    assert views["good"]["state"] == "new"
    assert (
        views["broken"]["state"] == "unknown" and "unreadable" in views["broken"]["says"] and name in views["broken"]["action"]
    )
    assert "unreadable" in call("status")
    for command in ("status", "report", "cancel"):
        with pytest.raises(UserError, match=f"run broken: .*{name} cannot be used") as caught:
            call(command, "broken")
        assert "\n" not in str(caught.value)


def test_attempts_that_cannot_be_listed_are_one_line(home: Path, monkeypatch: pytest.MonkeyPatch):
    broken = runs.make_run(home, "broken")

    def refuse(_: RunFolder) -> list[int]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(broken.attempts))

    monkeypatch.setattr(RunFolder, "attempt_numbers", refuse)
    assert "unreadable: attempts (Permission denied)" in call("status")
    for command in ("status", "logs", "report"):
        with pytest.raises(UserError, match="attempts cannot be used"):
            call(command, "broken")


def test_a_run_folder_that_may_not_be_looked_into_is_shown(home: Path, monkeypatch: pytest.MonkeyPatch):
    closed = runs.make_run(home, "closed").path
    stat, read_bytes, listdir = os.stat, Path.read_bytes, os.listdir

    def guarded(do):
        def check(path, *more, **named):
            if isinstance(path, str | Path) and closed in Path(path).parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return do(path, *more, **named)

        return check

    monkeypatch.setattr(os, "stat", guarded(stat))
    monkeypatch.setattr(Path, "read_bytes", guarded(read_bytes))
    monkeypatch.setattr(os, "listdir", guarded(listdir))
    assert "unreadable" in call("status")
    for command in ("status", "logs", "report", "checkpoints"):
        with pytest.raises(UserError, match=r"run closed: .* cannot be used \(Permission denied\)"):
            call(command, "closed")


def test_what_is_evaluated_by_default_is_no_run_that_cannot_be_read(home: Path):
    (runs.make_run(home, "broken").path / "finished.json").mkdir()
    with pytest.raises(UserError, match="has a complete checkpoint"):
        evaluating.newest_run()
    good = runs.make_run(home, "good")
    good.mark_finished(3, 1)
    assert evaluating.newest_run().path == good.path


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "report", "checkpoints"])
def test_a_name_too_long_for_a_file_is_an_unknown_run(home: Path, command: str):
    with pytest.raises(UserError, match="unknown run 'xxx"):
        call(command, "x" * 300)


def test_no_runs_and_unknown_runs(home: Path):
    assert "no runs here yet" in call("status")
    assert json.loads(call("status", "--json")) == []
    runs.make_run(home, "alpha")
    with pytest.raises(UserError, match="alpha"):
        call("status", "alhpa")


def slurm_run(home: Path, monkeypatch: pytest.MonkeyPatch, **verdict) -> RunFolder:
    run = runs.make_run(home)
    write_json(run.job, {"cluster": "slurm", "job_id": "7", "submitted": time.time()})
    answer = Verdict("7", **({"final": False, "source": "queue"} | verdict))
    monkeypatch.setattr(slurm, "job_state", lambda *_args, **_more: answer)
    return run


def test_a_held_job_tells_the_release_command(home: Path, monkeypatch: pytest.MonkeyPatch):
    slurm_run(home, monkeypatch, state=State.HELD, says="held (JobHeldUser)", hint="scontrol release 7", restarts=1)
    view = seen("demo")
    assert (view["state"], view["action"], view["restarts"], view["job"]) == ("held", "scontrol release 7", 1, "7")
    assert "scontrol release 7" in call("status")


def test_a_silent_slurm_is_unknown_and_a_heartbeat_speaks_for_a_run(home: Path, monkeypatch: pytest.MonkeyPatch):
    run = slurm_run(home, monkeypatch, state=State.UNKNOWN, source="nothing", says="unknown: no answer")
    assert seen("demo")["state"] == "unknown"
    run.beat(Status(3, 9, "rollout", 1, time.time()))
    assert seen("demo")["state"] == "running"


def test_an_ended_job_without_the_finish_mark_is_not_finished(home: Path, monkeypatch: pytest.MonkeyPatch):
    run = slurm_run(home, monkeypatch, state=State.COMPLETED, final=True, says="completed")
    assert seen("demo")["state"] == "failed"
    run.mark_finished(9, 1)
    assert seen("demo")["state"] == "finished"


def test_an_old_outcome_does_not_hide_a_new_job(home: Path, monkeypatch: pytest.MonkeyPatch):
    run = slurm_run(home, monkeypatch, state=State.WAITING, says="waits for free nodes")
    write_json(run.path / "outcome.json", {"state": "failed", "cause": "x", "time": time.time() - 60})
    assert seen("demo")["state"] == "waiting" and seen("demo")["cause"] == ""
    write_json(run.path / "outcome.json", {"state": "failed", "cause": "x", "time": time.time() + 60})
    assert seen("demo")["state"] == "failed"
