"""The verl engine on the CPU under a real Slurm: Ray, FSDP, vLLM, gateway and runners, through all that may happen to a job.

Every attempt starts the whole stack anew (a minute or two of both cores), so faults share one run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlight.cluster import ports, processes
from slurmlight.files import read_json, read_json_lines
from slurmlight.runfolder import RunFolder
from tests import runs
from tests.shared import REPOSITORY
from tests.slurmbed import SlurmBed

pytestmark = [pytest.mark.slurm, pytest.mark.stack]
for package in ("ray", "verl", "vllm"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (requirements-stack.lock)", allow_module_level=True)

PATIENCE_S = 900.0
STEPS = 6
LR = 3e-3  # one step moves every weight by about this much: rollouts from weights of a step before would be seen
PRESET = f"""
base = "tiny"
name = "small"

[engine]
name = "verl"
stack = "current"

[warmstart]
steps = 100
clean_steps = 80
batch_size = 16
lr = 3e-3

[data]
train_batch_size = 4

[actor_rollout_ref.actor]
ppo_mini_batch_size = 2
ppo_micro_batch_size_per_gpu = 4

[actor_rollout_ref.actor.optim]
lr = {LR}
lr_warmup_steps = 0

[actor_rollout_ref.rollout]
name = "vllm"
n = 4

[trainer]
total_training_steps = {STEPS}
save_freq = 1
test_freq = {STEPS}
val_before_train = false
logger = ["console"]

[runner]
n_runners = 8

[[reward]]
name = "execution_match"
weight = 0.5

[[reward]]
name = "format"
weight = 0.5
"""


@pytest.fixture(scope="module")
def bed(slurm: SlurmBed) -> Iterator[SlurmBed]:
    """A cluster of its own (``slurm`` skips where there is none): a step of this engine takes longer than its KillWait."""
    with SlurmBed(grace=60, slurmd_timeout=60, kill_wait=120, message_timeout=10) as bed:
        yield bed


@pytest.fixture
def home(bed: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="verl-"))
    (folder / "checkpoints").mkdir()
    (folder / ".venv").symlink_to(Path(sys.prefix))
    (folder / "small.toml").write_text(PRESET)
    for name, value in (bed.env | {"SLURMLIGHT_HOME": str(folder)}).items():
        monkeypatch.setenv(name, value)
    yield folder
    bed.cancel_all()
    shutil.rmtree(folder, ignore_errors=True) if "VERL_KEEP" not in os.environ else print(folder)


def launch(home: Path, *arguments: str) -> tuple[RunFolder, int]:
    command = [sys.executable, str(REPOSITORY / "launch.py"), "--preset", "small.toml", "--partition", "a800", "--no-follow"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=home, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunFolder(home / "checkpoints" / (arguments[arguments.index("--name") + 1] if "--name" in arguments else "small"))
    return run, int((read_json(run.path / "job.json") or {})["job_id"])


def rows(run: RunFolder) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(run.metrics) if row["step"]]


def wait_step(run: RunFolder, step: int) -> None:
    def there() -> bool:
        assert runs.outcome(run).get("state", "") in ("", "finished"), tail(run)
        return len(rows(run)) >= step

    runs.wait_for(there, f"step {step}", PATIENCE_S)


def finished(run: RunFolder) -> None:
    assert runs.wait_for(lambda: runs.outcome(run).get("state", ""), "the end", PATIENCE_S) == "finished", tail(run)


def tail(run: RunFolder) -> str:
    return runs.log(run)[-6000:]


def of_run(run: RunFolder, word: str) -> list[int]:
    """The run's living processes whose command line holds ``word``."""
    marks = [record.mark for record in runs.records(run)]
    found = []
    for pid in processes.marked(marks):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            if word in command and "leash" not in command:
                found.append(pid)
    return found


def test_trains_through_a_dead_runner_a_requeue_and_a_dead_gateway(bed: SlurmBed, home: Path) -> None:
    run, job = launch(home)
    wait_step(run, 1)
    (runner,) = of_run(run, "rollouts.runner")
    os.kill(runner, signal.SIGKILL)
    wait_step(run, 2)  # the runner was replaced, its episodes failed or were played by the new one
    assert of_run(run, "rollouts.runner") not in ([], [runner])
    bed.run("scontrol", "requeue", str(job))

    wait_step(run, 4)
    (gateway,) = of_run(run, "slurmlight.train.rollouts.server")
    os.kill(gateway, signal.SIGKILL)

    finished(run)
    first, second, third = runs.records(run)
    assert (first.kind, first.stop_reason) == ("stopped", "preemption or requeue"), tail(run)
    assert second.first_step == (first.last_step or 0) + 1  # saved at the step boundary: nothing is done twice
    assert (second.kind, third.kind) == ("crash", "finished")
    assert "gateway was killed by SIGKILL" in runs.log(run)
    assert not of_run(run, ""), "processes were left behind"
    done = rows(run)
    assert sorted({row["step"] for row in done}) == list(range(1, STEPS + 1))
    # vLLM samples with the trainer's weights: their log-probabilities of the same tokens are equal but for bfloat16, at every
    # step, while a step moves the policy by far more
    assert max(abs(row["actor/ppo_kl"]) for row in done) > 0.1
    assert max(abs(row["rollout_corr/kl"]) for row in done) < 0.01

    # the newest checkpoint's shards, merged by verl, served by vLLM, asked by the same agent
    command = [Path(sys.executable).with_name("slurmlight"), "eval", "small", "--cluster", "local", "--limit", "12"]
    done = subprocess.run(
        [*command, "--name", "after", "--follow"], capture_output=True, text=True, cwd=home, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (run.path / f"merged/global_step_{STEPS}/model.safetensors").exists()
    summary = read_json(next(home.glob("**/after/report/summary.json"))) or {}
    assert (summary["complete"], summary["answered"], summary["lost"]) == (True, 12, 0)


def second_raylet(run: RunFolder) -> int | None:
    """Once both nodes of ``run`` have one."""
    raylets = {
        number: pid for pid in of_run(run, "/raylet ") for number in "01" if f"\0SLURM_PROCID={number}\0" in _environment(pid)
    }
    return raylets.get("1") if len(raylets) == 2 else None


def _environment(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return ""


def test_two_nodes_form_one_cluster_lose_one_and_train(bed: SlurmBed, home: Path) -> None:
    one_step = ("trainer.total_training_steps=1", "trainer.test_freq=0")
    run, job = launch(home, "--nodes", "2", "--name", "two", *(part for setting in one_step for part in ("--set", setting)))
    os.kill(runs.wait_for(lambda: second_raylet(run), "two Ray nodes", PATIENCE_S), signal.SIGKILL)
    finished(run)
    assert [record.kind for record in runs.records(run)] == ["crash", "finished"], tail(run)
    assert "Ray lost a node" in runs.log(run) and bed.job(job)["Restarts"] == "1"
    assert len(rows(run)) == 1 and rows(run)[0]["actor/grad_norm"] > 0
    shards = sorted(path.name for path in (run.path / "global_step_1/actor").glob("model_world_size_*.pt"))
    assert shards == ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]
    runs.wait_for(lambda: bed.job(job)["JobState"] == "COMPLETED", "the job's end", PATIENCE_S)
    assert not of_run(run, "") and not list(run.path.glob("attempts/*/ray-token"))
    assert not list(ports.job_folder(job).glob("*/session*")), "Ray's folder goes with the attempt"
