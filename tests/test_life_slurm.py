"""A run's life under a real Slurm, the embedded engine as payload: whatever happens, it ends with the undisturbed weights.

Faults share runs, and runs share the cluster: every start of the engine costs seconds of both cores.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slurmlight import plan as plans
from slurmlight.cli import build
from slurmlight.cluster import submit
from slurmlight.files import read_json, write_json
from slurmlight.runfolder import RunFolder
from tests import lifebed, runs
from tests.lifebed import SAVE_FREQ, STEPS, Home, add_fault
from tests.slurmbed import SlurmBed

pytestmark = pytest.mark.slurm
PATIENCE_S = 600.0  # a start of the engine takes 10 s on two idle cores; here several start at once


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    folder = Path(tempfile.mkdtemp(prefix="life-"))
    yield Home(folder)
    shutil.rmtree(folder, ignore_errors=True) if "LIFE_KEEP" not in os.environ else print(folder)


@pytest.fixture(scope="module")
def bed(slurm: SlurmBed) -> Iterator[SlurmBed]:
    """A cluster of its own (``slurm`` skips where there is none): real KillWait and grace times are longer, too."""
    with SlurmBed(grace=30, slurmd_timeout=15, kill_wait=25) as bed:
        yield bed


@pytest.fixture(scope="module")
def undisturbed(home: Home, bed: SlurmBed) -> Callable[[], str]:
    """Gives the weights of a run that nothing happens to, made at the first call."""
    started: list[RunFolder] = []

    def wait() -> str:
        if not started:
            started.append(start(bed, home.run("undisturbed"))[0])
        run = started[0]
        finished(run)
        assert len(runs.records(run)) == 1, tail(run)
        return lifebed.weights(run)

    return wait


@pytest.fixture(scope="module")
def limited(bed: SlurmBed, home: Home) -> tuple[RunFolder, int]:
    """A slow run with a short time limit, of which Slurm warns 70 to 100 s after its start. It runs beside the others."""
    run = home.run("limited", time="5", signal_lead_s=200)
    (run.path / "pause").write_text("12")
    return start(bed, run)


@pytest.fixture(autouse=True)
def pointed(bed: SlurmBed, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    point(bed, home, monkeypatch)


def point(bed: SlurmBed, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (bed.env | {"SLURMLIGHT_HOME": str(home.path), "OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)


def start(bed: SlurmBed, run: RunFolder) -> tuple[RunFolder, int]:
    """Submit ``run`` as launch does; the run and its job id."""
    before = dict(os.environ)
    os.environ.update(bed.env | {"OMP_NUM_THREADS": "1"})
    try:
        return run, int(submit.submit(plans.from_json(read_json(run.plan) or {})))
    finally:
        os.environ.clear()
        os.environ.update(before)


def wait_step(run: RunFolder, step: int, attempt: int) -> None:
    def there() -> bool:
        status = run.status()
        return status is not None and status.attempt >= attempt and status.step >= step

    runs.wait_for(there, f"step {step} of {run.name} in attempt {attempt}\n{tail(run)}", PATIENCE_S)


def wait_attempt(run: RunFolder, number: int) -> None:
    runs.wait_for(lambda: max(run.attempt_numbers()) >= number, f"attempt {number} of {run.name}\n{tail(run)}", PATIENCE_S)


def finished(run: RunFolder) -> None:
    def over() -> str:
        return runs.outcome(run).get("state", "")

    assert runs.wait_for(over, f"the end of {run.name}", PATIENCE_S) == "finished", tail(run)


def tail(run: RunFolder) -> str:
    return runs.log(run)[-3000:]


def node_of(bed: SlurmBed, job: int) -> str:
    return bed.job(job)["BatchHost"]


def shown(command: str, name: str) -> dict[str, Any]:
    done = CliRunner().invoke(build(), [command, name, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def reasons(run: RunFolder) -> list[str]:
    return [record.stop_reason or record.kind for record in runs.records(run)]


def lost(run: RunFolder) -> list[int]:
    return [entry["lost_steps"] for entry in shown("report", str(run.path))["history"]]


def test_preempted_and_requeued(bed: SlurmBed, home: Home, undisturbed: Callable[[], str], limited: tuple[RunFolder, int]):
    wait_step(limited[0], 1, attempt=1)  # alone: with others beside it, its time might not do for a step
    run, job = start(bed, home.run("preempted", gpus=4))
    wait_step(run, 1, attempt=1)
    bed.submit("sleep 1", "-p", "urgent", "-w", node_of(bed, job), "--gres=gpu:a800:4")
    wait_step(run, 3, attempt=2)
    bed.run("scontrol", "update", "PartitionName=a800", "GraceTime=0")
    bed.submit("sleep 1", "-p", "urgent", "-w", node_of(bed, job), "--gres=gpu:a800:4")
    wait_step(run, 5, attempt=3)
    bed.run("scontrol", "requeue", str(job))
    finished(run)
    runs.wait_for(lambda: bed.job(job)["JobState"] == "COMPLETED", "the job's end")
    assert lifebed.weights(run) == undisturbed()
    assert reasons(run) == ["preemption", "preemption or requeue", "preemption or requeue", "finished"]
    assert lost(run) == [0, 0, 0, 0]

    bed.run("scontrol", "requeue", str(job))  # finished, and started again all the same
    runs.wait_for(lambda: (bed.job(job)["JobState"], bed.job(job)["Restarts"]) == ("COMPLETED", "4"), "the second end", 60)
    assert "nothing to do" in (run.path / f"submitit/{job}_0_log.out").read_text()
    view = shown("status", "preempted")
    facts = {key: view[key] for key in ("job", "state", "step", "total_steps", "attempts", "lost_steps", "cause")}
    assert facts == {
        "job": str(job), "state": "finished", "step": STEPS, "total_steps": STEPS, "attempts": 4, "lost_steps": 0, "cause": "",
    }  # fmt: skip


def test_killed_hung_and_on_lost_nodes(bed: SlurmBed, home: Home, undisturbed: Callable[[], str]):
    broken, _ = start(bed, home.run("broken"))
    add_fault(broken, 2, lifebed.KILL)
    add_fault(broken, 3, lifebed.KILL, at="save")
    add_fault(broken, 5, lifebed.KILL_SUPERVISOR)
    add_fault(broken, 8, lifebed.HANG)
    moved, job = start(bed, home.run("moved"))
    wait_step(moved, 1, attempt=1)
    down = node_of(bed, job)
    bed.set_down(down)
    bed.run("scontrol", "update", f"NodeName={down}", "State=DRAIN", "Reason=test")  # else it comes back by itself
    wait_step(moved, 4, attempt=2)
    cut = node_of(bed, job)
    bed.power_cut(cut)
    wait_attempt(moved, 3)
    bed.restore(cut)
    bed.resume(down)
    finished(broken)
    finished(moved)
    for run in (broken, moved):
        assert lifebed.weights(run) == undisturbed()
        assert max(lost(run)) <= SAVE_FREQ
    assert {"crash", "lost", "hang", "finished"} <= set(reasons(broken))
    assert "stacks follow" in runs.log(broken) and "most recent call first" in runs.log(broken)
    nodes = [record.node for record in runs.records(moved)]
    assert len(nodes) == 3 and nodes[0] != nodes[1] != nodes[2]
    assert not lifebed.payload_pids(broken) and not lifebed.payload_pids(moved)
    seen = {(record.node, run.name) for run in (broken, moved) for record in runs.records(run)}
    assert any((node, "broken") in seen and (node, "moved") in seen for node in nodes), "two jobs shared a node"


def test_warned_by_a_user_signal_and_on_a_full_disk(
    home: Home, undisturbed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
):
    expected = undisturbed()
    small = Path(tempfile.mkdtemp(prefix="small-"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(small)]).returncode == 0
    try:
        with SlurmBed(grace=30, user_signal=True, kill_wait=25) as bed:  # its nodes see what was mounted before them
            point(bed, home, monkeypatch)
            run, job = start(bed, home.run("warned", under=small, gpus=4))
            wait_step(run, 1, attempt=1)
            bed.submit("sleep 1", "-p", "urgent", "-w", node_of(bed, job), "--gres=gpu:a800:4")
            if mounted:  # a plain user has no disk to fill
                add_fault(run, 5, FILL.format(folder=small))
                runs.wait_for(lambda: (small / "filler").exists() and not lifebed.payload_pids(run), "the failure", PATIENCE_S)
                (small / "filler").unlink()
            finished(run)
            assert lifebed.weights(run) == expected
            first, *later = runs.records(run)
            assert first.stop_reason == "preemption" and lost(run)[0] == 0
            if mounted:
                assert [record.kind for record in later] == ["crash", "finished"]
                assert "disk full" in later[0].cause or "no room for checkpoint 6" in later[0].cause
                assert later[1].first_step == 4, "from the checkpoint before"
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(small)], check=True)
        shutil.rmtree(small, ignore_errors=True)


# Leaves room for words and weights, not for a checkpoint.
FILL = """
import shutil
with open("{folder}/filler", "wb") as file:
    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage("{folder}").free - (3 << 20))
"""


@pytest.mark.parametrize("supervisor_too", [False, True])
def test_a_killed_batch_process_costs_an_attempt(bed: SlurmBed, home: Home, supervisor_too: bool):
    bed.wait_idle()
    run = runs.make_run(home.path, f"batch-{supervisor_too}", steps=8, cluster="slurm", partition="a800", time="60")
    runs.add_fault(run, 5, "time.sleep(600)", attempt=1)  # until it is killed
    _, job = start(bed, run)

    def cut_loose() -> bool:
        """Of the canary there are its shell and one process of its srun: srun's watcher is gone."""
        canary = _processes(bed, job, b"sh\0-c\0", b"canary")
        return sorted(_name(pid) for pid in canary) == ["sh", "srun"]

    runs.wait_for(cut_loose, "a canary that is cut loose", PATIENCE_S)
    wait_step(run, 4, attempt=1)
    found = _processes(bed, job, b"submitit.core._submit", str(run.path).encode())
    (batch,) = [pid for pid in found if _parent(pid) not in found]
    os.kill(batch, signal.SIGKILL)
    if supervisor_too:
        (supervisor,) = set(found) - {batch}
        os.kill(supervisor, signal.SIGKILL)
    wait_attempt(run, 2)
    finished(run)
    assert bed.job(job)["Restarts"] == "1" and [record.kind for record in runs.records(run)] == ["lost", "finished"]


def _processes(bed: SlurmBed, job: int, *words: bytes) -> list[int]:
    """Those of ``job``, on whatever node of the bed, whose command line holds ``words``."""
    of_job = {b"SLURM_JOB_ID=%d" % job, f"SLURM_CONF={bed.env['SLURM_CONF']}".encode()}  # other beds count jobs from 1, too
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes().split(b"\0")
            if all(word in line for word in words) and of_job <= set(environment):
                found.append(int(entry.name))
    return found


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_what_does_not_come_back_names_its_cause(bed: SlurmBed, home: Home):
    bed.wait_idle()
    loop = runs.make_run(home.path, "loop", cluster="slurm", partition="a800", time="60")
    runs.add_fault(loop, 1, "raise ValueError('no such column: singer')")
    _, looping = start(bed, loop)
    wrong = home.run("wrong", gpus=4)
    _sharded(wrong, world_size=8)
    _, refused = start(bed, wrong)
    _, waiting = start(bed, home.run("held"))
    bed.wait_job(waiting, "RUNNING")
    bed.run("scontrol", "requeuehold", str(waiting))

    runs.wait_for(lambda: shown("status", "held")["state"] == "held", "the hold", 120)
    assert f"scontrol release {waiting}" in shown("status", "held")["action"]
    bed.run("scancel", str(waiting))

    runs.wait_for(lambda: bed.job(looping)["JobState"] == "FAILED", "the crash loop's end", PATIENCE_S)
    view = shown("status", "loop")
    assert (
        view["state"] == "failed" and "crash loop" in view["cause"] and "application error" in view["cause"] and view["action"]
    )
    assert view["restarts"] == 1 and view["attempts"] == 2

    runs.wait_for(lambda: bed.job(refused)["JobState"] == "FAILED", "the refusal", PATIENCE_S)
    assert bed.job(refused)["ExitCode"].startswith("2:")
    view = shown("status", "wrong")
    assert view["state"] == "failed" and "8" in view["cause"] and view["restarts"] == 0, view


def test_at_its_time_limit(bed: SlurmBed, undisturbed: Callable[[], str], limited: tuple[RunFolder, int]):
    run, job = limited
    finished(run)
    assert lifebed.weights(run) == undisturbed()
    ends = list(zip(reasons(run), lost(run), strict=True))
    assert ("time limit", 0) in ends and all(steps == 0 for reason, steps in ends if reason == "time limit")
    assert int(bed.job(job)["Restarts"]) > 0


def _sharded(run: RunFolder, world_size: int) -> None:
    """A checkpoint of another number of GPUs (K-08)."""
    import torch

    actor = run.path / "global_step_20/actor"
    actor.mkdir(parents=True)
    for rank in range(world_size):
        for part in ("model", "optim", "extra_state"):
            torch.save({}, actor / f"{part}_world_size_{world_size}_rank_{rank}.pt")
    torch.save({}, actor.parent / "data.pt")
    write_json(run.tracker, 20)
