"""The whole life of an evaluation under a real Slurm: train, sbatch slurm/eval.sbatch, preempted in the middle, finished."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmlight.evaluate.store import read_parts
from slurmlight.files import read_json
from slurmlight.runfolder import RunFolder
from tests import runs, trainbed
from tests.evalbed import write_questions
from tests.shared import REPOSITORY
from tests.slurmbed import SlurmBed

pytestmark = pytest.mark.slurm
PATIENCE_S = 400.0
QUESTIONS = 240


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


def test_preempted_in_the_middle_every_question_is_answered_exactly_once(home: Path, cluster: SlurmBed) -> None:
    (home / "logs").mkdir()
    flags = ["pets", "--data", str(home / "data/many.parquet"), "--in-flight", "2"]
    where = [
        "--parsable",
        "--cpus-per-task=1",
        "--gres=gpu:a800:4",
        "--output",
        f"{home}/logs/%j.log",
        "--chdir",
        str(REPOSITORY),
    ]
    env = cluster.env | {"SLURMLIGHT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    sbatch = ["sbatch", *where, str(REPOSITORY / "slurm/eval.sbatch"), *flags]
    done = subprocess.run(sbatch, env=env, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    run = RunFolder(home / "checkpoints/pets/eval/step-1-many")

    def said() -> str:
        log = home / f"logs/{job}.log"
        return (log.read_text() if log.exists() else "no log") + (runs.log(run) if run.path.exists() else "")

    runs.wait_for(lambda: runs.step(run) > 0, f"the first answers\n{said()}", PATIENCE_S)
    urgent = cluster.submit("sleep 1", "-p", "urgent", "-w", cluster.job(job)["BatchHost"], "--gres=gpu:a800:4")
    runs.wait_for(lambda: len(runs.records(run)) > 1, "the second attempt", PATIENCE_S)
    before = len({one.key for one in read_parts(run.path)})
    runs.wait_for(lambda: runs.outcome(run).get("state"), f"its end\n{said()}", PATIENCE_S)
    assert runs.outcome(run)["state"] == "finished", said()
    cluster.wait_job(job, "COMPLETED")
    cluster.wait_job(urgent, "COMPLETED")

    answers = read_parts(run.path)
    assert [one.key for one in answers] == [(index, 0) for index in range(QUESTIONS)]
    assert 0 < before < QUESTIONS, "it was preempted in the middle"
    by_attempt = {number: sum(one.attempt == number for one in answers) for number in (1, 2)}
    assert all(by_attempt.values()) and sum(by_attempt.values()) == QUESTIONS
    assert [record.stop_reason or record.kind for record in runs.records(run)] == ["preemption", "finished"]
    summary = read_json(run.path / "report/summary.json") or {}
    assert summary["complete"] and summary["subject"]["step"] == 1
    assert summary["evaluators"]["strict"]["questions"] == QUESTIONS
    assert "training curve" in (run.path / "report/report.html").read_text()
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _runs_here(pid, run.path)], "no process is left"


def _runs_here(pid: str, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False
