"""Ten random faults over one run of the embedded engine under a real Slurm. Minutes: SLURMLIGHT_SOAK=1 (or a seed) turns it on.

SLURMLIGHT_SOAK=1 .venv/bin/pytest -s tests/test_life_soak.py
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmlight.cluster import submit
from slurmlight.files import read_json
from slurmlight.plan import from_json
from slurmlight.runfolder import RunFolder
from tests import lifebed, runs
from tests.slurmbed import SlurmBed

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif("SLURMLIGHT_SOAK" not in os.environ, reason="takes minutes: set SLURMLIGHT_SOAK to a seed"),
]
FAULTS, STEPS, PATIENCE_S = 10, 40, 400.0


class Faults:
    """What can happen to the job of ``run``."""

    def __init__(self, bed: SlurmBed, run: RunFolder, job: int) -> None:
        self.bed, self.run, self.job = bed, run, job

    def all(self) -> list[Callable[[], None]]:
        return [self.preempted, self.requeued, self.warned, self.payload_killed, self.supervisor_killed,
                self.hung, self.node_down, self.power_cut, self.killed_in_a_save]  # fmt: skip

    def preempted(self) -> None:
        self.bed.submit("sleep 1", "-p", "urgent", "-w", self._node(), "--gres=gpu:a800:4")

    def requeued(self) -> None:
        self.bed.run("scontrol", "requeue", str(self.job))

    def warned(self) -> None:
        self.bed.run("scancel", "-b", "-s", "USR2", str(self.job))

    def payload_killed(self) -> None:
        self._next_step(lifebed.KILL)

    def supervisor_killed(self) -> None:
        self._next_step(lifebed.KILL_SUPERVISOR)

    def killed_in_a_save(self) -> None:
        step = runs.step(self.run) + 2
        lifebed.add_fault(self.run, step + -step % lifebed.SAVE_FREQ, lifebed.KILL, at="save")

    def hung(self) -> None:
        for pid in lifebed.payload_pids(self.run):
            os.kill(pid, signal.SIGSTOP)

    def node_down(self) -> None:
        node = self._node()
        self.bed.set_down(node)
        self.bed.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")

    def power_cut(self) -> None:
        self.bed.power_cut(self._node())

    def _node(self) -> str:
        return self.bed.job(self.job)["BatchHost"]

    def _next_step(self, do: str) -> None:
        lifebed.add_fault(self.run, runs.step(self.run) + 2, do)


def test_ten_random_faults_over_one_run(slurm: SlurmBed, monkeypatch: pytest.MonkeyPatch):
    chance = random.Random(int(os.environ["SLURMLIGHT_SOAK"]))
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        with SlurmBed(grace=30, slurmd_timeout=15, kill_wait=25) as bed:
            for name, value in (bed.env | {"OMP_NUM_THREADS": "1", "SLURMLIGHT_HOME": str(folder)}).items():
                monkeypatch.setenv(name, value)
            home = lifebed.Home(folder, STEPS)
            calm, run = home.run("calm"), home.run("soaked", gpus=4)
            submit.submit(from_json(read_json(calm.plan)))
            faults = Faults(bed, run, int(submit.submit(from_json(read_json(run.plan)))))
            for number in range(1, FAULTS + 1):
                attempt = _wait_for_a_step(run)
                fault = chance.choice(faults.all())
                print(f"fault {number} in attempt {attempt} at step {runs.step(run)}: {fault.__name__}", flush=True)
                fault()
                runs.wait_for(lambda n=attempt: max(run.attempt_numbers()) > n, f"what follows {fault.__name__}", PATIENCE_S)
                _mend(bed)
            for one in (run, calm):
                runs.wait_for(lambda one=one: runs.outcome(one), "the end", PATIENCE_S)
            assert runs.outcome(run)["state"] == "finished", runs.log(run)[-4000:]
            assert lifebed.weights(run, STEPS) == lifebed.weights(calm, STEPS)
            for record in runs.records(run):
                print(record.attempt, record.node, record.kind, record.stop_reason, record.first_step, record.last_step)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_a_step(run: RunFolder) -> int:
    """Until the newest attempt has done a step: which attempt that is."""

    def stepped() -> int:
        record = runs.records(run)[-1:]
        grew = record and run.metrics.exists() and run.metrics.stat().st_size > record[0].metrics_offset
        return record[0].attempt if grew else 0

    return runs.wait_for(stepped, f"a step\n{runs.log(run)[-2000:]}", PATIENCE_S)


def _mend(bed: SlurmBed) -> None:
    for node, state in bed.node_states().items():
        bed.restore(node)
        if state.startswith(("down", "drain")):
            bed.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
