"""The whole life of an evaluation under a real Slurm: after a training job, submitted both ways, preempted, finished."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from slurmlight import chaining, evaljobs, evaluating, launching
from slurmlight.chaining import Chained
from slurmlight.errors import UserError
from slurmlight.evaluate.store import read_parts
from slurmlight.files import read_json
from slurmlight.plan import ClusterName, JobPlan
from slurmlight.presets import Preset
from slurmlight.runfolder import RunFolder, find_run
from slurmlight.train.config import read_preset
from tests import runs, trainbed
from tests.evalbed import write_questions
from tests.shared import REPOSITORY
from tests.slurmbed import SlurmBed

PATIENCE_S = 400.0
QUESTIONS = 480


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A home with a run of one real training step: a checkpoint of a random policy that learned a little."""
    folder = Path(tempfile.mkdtemp(prefix="eval-"))
    settings = ["trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.test_freq=0", "agent.max_turns=1"]
    run = trainbed.make_run(folder, "checkpoints/pets", settings)
    subprocess.run([sys.executable, "-m", "tests.trainbed", str(run)], check=True, cwd=REPOSITORY, timeout=PATIENCE_S)
    rows = [{"question": text, "db_id": "pets", "query": "select count(*) from pet"} for text in trainbed.QUESTIONS]
    write_questions(folder / "data", [rows[number % len(rows)] for number in range(QUESTIONS)], "many.parquet")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pointed(home: Path, cluster: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> SlurmBed:
    """The cluster, with that home in the environment of whatever is submitted."""
    for name, value in {"SLURMLIGHT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}.items():
        monkeypatch.setenv(name, value)
    return cluster


def with_sbatch(home: Path, flags: list[str]) -> int:
    where = ["--parsable", "--cpus-per-task=1", "--gres=gpu:a800:4", "--output", f"{home}/%j.log", "--chdir", str(REPOSITORY)]
    done = run_command("sbatch", *where, str(REPOSITORY / "slurm/eval.sbatch"), *flags)
    return int(done.stdout)


def with_slurmlight(home: Path, flags: list[str]) -> int:
    """submitit's job, on a node of its own: it asks for all of the cores."""
    cli = [sys.executable, "-m", "slurmlight.cli", "eval", *flags, "--name", "two", "--partition", "a800", "--cpus", "32"]
    run_command(*cli, "--no-follow")
    return int((read_json(home / "checkpoints/pets/eval/two/job.json") or {})["job_id"])


def run_command(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slurm
def test_preempted_in_the_middle_every_question_is_answered_exactly_once(home: Path, pointed: SlurmBed) -> None:
    flags = ["pets", "--data", str(home / "data/many.parquet"), "--in-flight", "1"]
    folders = [RunFolder(home / "checkpoints/pets/eval" / name) for name in ("step-1-many", "two")]
    jobs = [with_sbatch(home, flags), with_slurmlight(home, flags)]
    payloads: dict[str, int] = {}

    def caught() -> bool:
        """Both stand still after their first answers: else they might be done before Slurm has preempted them."""
        for run in folders:
            if run.name not in payloads and runs.step(run) > 0:
                (payloads[run.name],) = _processes_of(run.path, b"slurmlight.evaluate.main")
                os.kill(payloads[run.name], signal.SIGSTOP)
        return len(payloads) == len(folders)

    runs.wait_for(caught, "the first answers", PATIENCE_S)
    for run, job in zip(folders, jobs, strict=True):
        pointed.submit("sleep 1", "-p", "urgent", "-w", pointed.job(job)["BatchHost"], "--cpus-per-task=32")
        runs.wait_for(run.stop_request, f"the request to stop\n{said(home, job, run)}", PATIENCE_S)
        os.kill(payloads[run.name], signal.SIGCONT)
    for run, job in zip(folders, jobs, strict=True):
        runs.wait_for(lambda run=run: runs.outcome(run).get("state"), "its end", PATIENCE_S)
        assert runs.outcome(run)["state"] == "finished", said(home, job, run)
        pointed.wait_job(job, "COMPLETED")
        check_every_question_once(run)


def check_every_question_once(run: RunFolder) -> None:
    answers = read_parts(run.path)
    assert [one.key for one in answers] == [(index, 0) for index in range(QUESTIONS)]
    by_attempt = {number: sum(one.attempt == number for one in answers) for number in (1, 2)}
    assert all(by_attempt.values()) and sum(by_attempt.values()) == QUESTIONS
    assert [record.stop_reason or record.kind for record in runs.records(run)] == ["preemption", "finished"]
    summary = read_json(run.path / "report/summary.json") or {}
    assert summary["complete"] and summary["subject"]["step"] == 1
    assert summary["evaluators"]["strict"]["questions"] == QUESTIONS
    assert "training curve" in (run.path / "report/report.html").read_text()
    runs.wait_for(lambda: not _processes_of(run.path), "the end of all its processes")


def said(home: Path, job: int, run: RunFolder) -> str:
    logs = [home / f"{job}.log", run.path / f"submitit/{job}_0_log.out"]
    return "\n".join(log.read_text() for log in logs if log.exists()) + (runs.log(run) if run.path.exists() else "")


def _processes_of(folder: Path, *words: bytes) -> list[int]:
    """Those whose command line holds ``folder`` and ``words``, on any node of the bed, as seen from here."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes()
            if all(word in line for word in (str(folder).encode(), *words)):
                found.append(int(entry.name))
    return found


def chained(name: str, *payload: str, cluster: ClusterName = "slurm") -> tuple[JobPlan, Preset, Chained]:
    """A training run and the evaluation after it, as ``launch.py --then-eval`` plans them; ``payload`` stands for the
    training's."""
    preset = read_preset(find_run("pets").path)
    flags = {"partition": "a800", "cpus": 1}
    plan = launching.make_plan(preset, cluster, name, False, flags)
    plan = replace(plan, payload=payload or (sys.executable, "-m", "tests.lifebed", plan.run_folder))
    return plan, preset, chaining.plan_after(plan, preset, False, flags)


def job_of(folder: str | Path) -> int:
    return int((read_json(RunFolder(folder).job) or {})["job_id"])


@pytest.mark.slurm
def test_the_evaluation_waits_for_a_training_that_is_requeued(home: Path, pointed: SlurmBed) -> None:
    plan, preset, then = chained("first")
    run = RunFolder(plan.run_folder)
    run.path.mkdir()
    (run.path / "pause").write_text("1")
    preset = msgspec.structs.replace(preset, trainer=msgspec.structs.replace(preset.trainer, total_training_steps=4))
    assert chaining.start(plan, preset, "test", then, fresh=False, follow=False) == 0
    training, evaluation = job_of(run.path), job_of(then.plan.run_folder)
    runs.wait_for(lambda: runs.step(run) >= 1, "step 1", PATIENCE_S)
    pointed.run("scontrol", "requeue", str(training))
    runs.wait_for(lambda: len(runs.records(run)) == 2, "the second attempt", PATIENCE_S)
    assert pointed.job(evaluation)["Reason"] == "Dependency"
    assert chaining.start(plan, preset, "test", then, fresh=False, follow=False) == 0, "launched again meanwhile"
    assert (job_of(run.path), job_of(then.plan.run_folder)) == (training, evaluation), "nothing is submitted twice"

    follower = chaining.start(plan, preset, "test", then, fresh=False, follow=True)
    assert follower == 0, runs.log(run) + runs.log(RunFolder(then.plan.run_folder))
    assert [record.last_step for record in runs.records(run)][-1] == 4
    summary = read_json(Path(then.plan.run_folder) / "report/summary.json") or {}
    assert summary["complete"] and summary["subject"]["step"] == 4
    assert pointed.job(evaluation)["Restarts"] == "0"

    assert not evaluating.outdated(then.config, RunFolder(then.plan.run_folder))
    (run.path / "finished.json").unlink()  # as a launch with more steps does
    assert evaluating.outdated(then.config, RunFolder(then.plan.run_folder)), "the next one evaluates another step"


@pytest.mark.slurm
def test_the_chain_of_a_training_that_failed_is_made_anew(home: Path, pointed: SlurmBed, capfd: pytest.CaptureFixture[str]):
    plan, preset, then = chained("second", "sleep", "600")
    assert chaining.start(plan, preset, "test", then, fresh=False, follow=False) == 0
    before = job_of(then.plan.run_folder)
    pointed.run("scancel", str(job_of(plan.run_folder)))
    pointed.wait_job(before, "CANCELLED")
    assert evaljobs.see_through(then.plan) == 1
    assert f"(cancelled by Slurm: job {job_of(plan.run_folder)} did not end as asked)" in capfd.readouterr().err
    runs.wait_for(lambda: not launching.active_job(RunFolder(plan.run_folder)), "the end of the training job", PATIENCE_S)

    assert chaining.start(plan, preset, "test", then, fresh=False, follow=False) == 0
    now = job_of(then.plan.run_folder)
    assert now != before and pointed.job(now)["Dependency"].startswith(f"afterok:{job_of(plan.run_folder)}(")

    other = pointed.submit("sleep 1", "--hold")
    moved = replace(then.plan, dependency=f"afterok:{other}")
    assert evaljobs.begin(then.config, moved, fresh=False, follow=False)
    assert pointed.job(now)["JobState"] == "CANCELLED", "it waited for another job than this launch's"
    assert pointed.job(job_of(moved.run_folder))["Dependency"].startswith(f"afterok:{other}(")


def test_on_this_machine_the_evaluation_follows_a_training_that_finished(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMLIGHT_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    plan, preset, then = chained("third", "false", cluster="local")
    with pytest.raises(UserError, match="--no-follow and --then-eval"):
        chaining.start(plan, preset, "test", then, fresh=False, follow=False)
    assert chaining.start(plan, preset, "test", then, fresh=False, follow=True) == 1
    assert not Path(then.plan.run_folder).exists(), "a training that failed is not evaluated"

    plan, preset, then = chained("pets", cluster="local")
    assert chaining.start(plan, preset, "test", then, fresh=False, follow=True) == 0, capfd.readouterr().err
    summary = read_json(Path(then.plan.run_folder) / "report/summary.json") or {}
    assert summary["complete"] and summary["subject"]["step"] == 1


def test_a_policy_server_that_is_killed_costs_an_attempt_and_no_answer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLIGHT_HOME", str(home))
    flags = ["--data", str(home / "data/many.parquet"), "--in-flight", "2", "--name", "killed", "--cluster", "local"]
    run = RunFolder(home / "checkpoints/pets/eval/killed")
    command = [sys.executable, "-m", "slurmlight.cli", "eval", "pets", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY) as process:
        runs.wait_for(lambda: runs.step(run) > 0 or process.poll() is not None, "the first answers", PATIENCE_S)
        (server,) = _processes_of(home, b"policy_server")
        os.kill(server, signal.SIGKILL)
        told, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, told
    first, second = runs.records(run)
    assert (first.kind, second.kind) == ("crash", "finished") and "policy server was killed by SIGKILL" in first.cause
    assert [one.key for one in read_parts(run.path)] == [(index, 0) for index in range(QUESTIONS)]
    assert {one.attempt for one in read_parts(run.path)} == {1, 2}
