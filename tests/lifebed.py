"""Runs of the embedded engine that take faults on request, for the tests of a run's life under Slurm.

python -m tests.lifebed RUN_FOLDER    the payload: trainbed's engine, faults and pauses added

RUN/faults.jsonl holds {"step": N, "at": "step" or "save", "do": PYTHON}: done once each, in the middle of that step's
rollouts or of its save. RUN/pause holds seconds to sleep in each step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slurmlight import plan as plans
from slurmlight.cluster import processes
from slurmlight.files import append_line, read_json_lines, write_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder
from tests.shared import REPOSITORY

STEPS, SAVE_FREQ = 10, 3
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
KILL_SUPERVISOR = "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)"
HANG = "os.kill(os.getpid(), signal.SIGSTOP)"


class Home:
    """A folder with data and a random policy, made once, and runs under checkpoints/ that differ in name only."""

    def __init__(self, path: Path, steps: int = STEPS) -> None:
        self.path, self.steps = path, steps
        self._made = False

    def run(self, name: str, *, under: Path | None = None, **plan: Any) -> RunFolder:
        """A run that is ready to submit; ``under`` puts its folder elsewhere, ``plan`` changes fields of its JobPlan."""
        from tests import trainbed

        checkpoints = under or self.path / "checkpoints"
        if not self._made:
            settings = [f"trainer.total_training_steps={self.steps}", f"trainer.save_freq={SAVE_FREQ}", "trainer.test_freq=0"]
            trainbed.make_run(self.path, "template", settings)
            self._made = True
        folder = checkpoints / name
        folder.mkdir(parents=True)
        shutil.copy(self.path / "template/config.json", folder)
        payload = (sys.executable, "-m", "tests.lifebed", str(folder))
        fields: dict[str, Any] = {"partition": "a800", "time": "60", "gpus": 1, "gpu_type": "a800", "step_s": 30}
        run = RunFolder(folder)
        write_json(
            run.plan, plans.to_json(JobPlan(name, str(folder), str(REPOSITORY), payload=payload, **self._rest(fields | plan)))
        )
        return run

    @staticmethod
    def _rest(fields: dict[str, Any]) -> dict[str, Any]:
        return {"cluster": "slurm", "preset": "tiny"} | fields


def add_fault(run: RunFolder, step: int, do: str, at: str = "step") -> None:
    append_line(run.path / "faults.jsonl", json.dumps({"step": step, "at": at, "do": do}))


def weights(run: RunFolder, step: int = STEPS) -> str:
    """sha256 of the checkpoint's model and optimiser, bit by bit."""
    digest = hashlib.sha256()
    for path in sorted((run.path / f"global_step_{step}/actor").glob("*_rank_0.pt")):
        if not path.name.startswith("extra"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def payload_pids(run: RunFolder) -> list[int]:
    """The main processes of the run's payloads, in whatever node's process table, as seen from here."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"tests.lifebed" in words and str(run.path).encode() in words and processes.state(int(entry.name)) != "Z":
                found.append(int(entry.name))
    return found


# the payload


def main() -> int:
    from slurmlight.train.embedded import engine
    from tests import trainbed

    run = RunFolder(sys.argv[1])
    original_saving, original_play = engine.saving, engine._Attempt._play

    @contextmanager
    def saving(folder: Path, step: int) -> Iterator[Path]:
        with original_saving(folder, step) as target:
            yield target
            _faults(run, step, "save")

    def play(self: Any) -> Any:
        with suppress(OSError, ValueError):
            time.sleep(float((run.path / "pause").read_text()))
        _faults(run, self.step, "step")
        return original_play(self)

    engine.saving, engine._Attempt._play = saving, play  # type: ignore[assignment]
    return trainbed.main()


def _faults(run: RunFolder, step: int, at: str) -> None:
    done = read_json_lines(run.path / "faults.done")
    for fault in read_json_lines(run.path / "faults.jsonl"):
        if (fault["step"], fault["at"]) == (step, at) and fault not in done:
            append_line(run.path / "faults.done", json.dumps(fault))
            os.sync()
            exec(fault["do"], {"os": os, "signal": signal, "time": time, "run": run})


if __name__ == "__main__":
    raise SystemExit(main())
