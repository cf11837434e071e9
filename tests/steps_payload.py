"""A small payload with the run folder's whole contract: steps, heartbeats, metrics, saves, stop request, finish mark.

    python tests/steps_payload.py RUN_FOLDER STEPS SECONDS_A_STEP SAVE_FREQ

Its "weights" are a hash chained over the steps, so a run is undisturbed only if the end is bit-identical. Faults come from
RUN/faults.jsonl: {"step": N, "attempt": A or null, "do": PYTHON}, executed in the middle of step N.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from slurmlight.files import read_json_lines, write_atomic
from slurmlight.runfolder import RunFolder, Status


def main() -> int:
    run = RunFolder(sys.argv[1])
    steps, seconds, every = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    attempt = int(os.environ["SLURMLIGHT_ATTEMPT"])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append("TERM"))
    faults = [f for f in read_json_lines(run.path / "faults.jsonl") if f.get("attempt") in (None, attempt)]
    step, weights = resume(run)
    print(f"payload resumes from step {step}", flush=True)
    beat(run, step, steps, "start", attempt)
    while step < steps:
        if run.stop_request() or asked:
            save(run, step, weights)
            print(f"payload stopped at step {step}", flush=True)
            return 75
        step += 1
        beat(run, step - 1, steps, "rollout", attempt)
        time.sleep(seconds / 2)
        for fault in faults:
            if fault["step"] == step:
                exec(fault["do"], globals() | locals())
        time.sleep(seconds / 2)
        weights = hashlib.sha256(f"{weights} {step}".encode()).hexdigest()
        if step % every == 0 or step == steps:
            save(run, step, weights)
        run.add_metrics({"step": step, "training/reward": step / steps, "timing_s/step": seconds})
        beat(run, step, steps, "step", attempt)
    run.mark_finished(step, attempt)
    return 0


def beat(run: RunFolder, step: int, steps: int, phase: str, attempt: int) -> None:
    run.beat(Status(step, steps, phase, attempt, time.time(), reward=step / steps, seconds_per_step=0.1, pid=os.getpid()))


def resume(run: RunFolder) -> tuple[int, str]:
    found = sorted((int(path.name.removeprefix("global_step_")), path) for path in run.path.glob("global_step_*"))
    return (found[-1][0], (found[-1][1] / "weights").read_text()) if found else (0, "")


def save(run: RunFolder, step: int, weights: str) -> None:
    final = run.path / f"global_step_{step}"
    if final.exists() or step == 0:
        return
    temporary = run.path / f".global_step_{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write_atomic(temporary / "weights", weights)
    temporary.rename(final)
    write_atomic(run.tracker, str(step))


def weights_after(steps: int) -> str:
    """What an undisturbed run ends with."""
    weights = ""
    for step in range(1, steps + 1):
        weights = hashlib.sha256(f"{weights} {step}".encode()).hexdigest()
    return weights


def weights_of(folder: Path, steps: int) -> str:
    return (folder / f"global_step_{steps}" / "weights").read_text()


if __name__ == "__main__":
    raise SystemExit(main())
