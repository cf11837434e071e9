"""What a job's life costs under a real Slurm on this machine: steps lost, seconds of a restart, CPU and memory.

python bench/bench_slurm.py        (needs slurm-wlm and munge; brings up its own cluster; about two minutes)

The payload is tests/steps_payload.py (half a second a step, a save every 10), so what is measured is the kit and Slurm.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from slurmlight import plan as plans  # noqa: E402
from slurmlight.cluster import guard, overview, processes, submit  # noqa: E402
from slurmlight.files import read_json  # noqa: E402
from slurmlight.runfolder import RunFolder  # noqa: E402
from tests import runs  # noqa: E402
from tests.slurmbed import SlurmBed  # noqa: E402

STEP_S, SAVE_FREQ, STEPS = 0.5, 10, 40
TICKS = os.sysconf("SC_CLK_TCK")


def start(
    home: Path, name: str, *, gpus: int = 4, steps: int = STEPS, time: str = "60", lead: int = 120
) -> tuple[RunFolder, int]:
    fields = {"cluster": "slurm", "partition": "a800", "gpus": gpus, "gpu_type": "a800", "time": time, "signal_lead_s": lead}
    run = runs.make_run(home, name, steps=steps, seconds=STEP_S, save_freq=SAVE_FREQ, **fields)
    return run, int(submit.submit(plans.from_json(read_json(run.plan))))


def steps_lost(bed: SlurmBed, home: Path) -> None:
    """One fault a run, each at an odd step between two saves."""

    def preempt(job: int) -> None:
        bed.submit("sleep 1", "-p", "urgent", "-w", bed.job(job)["BatchHost"], "--gres=gpu:a800:4")

    def power_cut(job: int) -> None:
        node = bed.job(job)["BatchHost"]
        bed.power_cut(node)
        time.sleep(25)  # longer than SlurmdTimeout: Slurm must see it gone
        bed.restore(node)

    faults = {
        "preemption with grace": preempt,
        "scontrol requeue": lambda job: bed.run("scontrol", "requeue", str(job)),
        "USR2, as before a time limit": lambda job: bed.run("scancel", "-b", "-s", "USR2", str(job)),
        "payload kill -9": lambda job: _kill_payload(started[job]),
        "power cut": power_cut,
    }
    started: dict[int, RunFolder] = {}
    for name, fault in faults.items():
        run, job = start(home, name.replace(" ", "-").replace(",", ""))
        started[job] = run
        runs.wait_for(lambda run=run: runs.step(run) >= SAVE_FREQ + 5, "step 15", 120)
        begin = time.monotonic()
        fault(job)
        runs.wait_for(lambda run=run: runs.outcome(run).get("state") == "finished", name, 180)
        view = overview.look(run)
        first, second = runs.records(run)[:2]
        assert first.ended
        away = second.started - first.ended
        print(
            f"{name:<30} {view.lost_steps} steps lost of a save_freq of {SAVE_FREQ}; away for {away:.1f} s (6 s is Slurm's "
            f"cred_expire + 1); to the end {time.monotonic() - begin:.0f} s"
        )
    for run in started.values():
        restart(run)


def _kill_payload(run: RunFolder) -> None:
    for pid in processes.marked([runs.records(run)[-1].mark]):
        os.kill(pid, 9)


def restart(run: RunFolder) -> None:
    """The kit's own part: from the start of the batch process to the start of the payload in the last attempt."""
    ticks = (guard.owner(run) or {}).get("start", 0)
    boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    last = runs.records(run)[-1]
    line = next(
        line for line in runs.log(run).split(f"attempt {last.attempt} ===")[-1].splitlines() if line.startswith("[payload]")
    )
    payload = last.started + float(line.split("+")[1].split()[0])
    print(f"restart {run.name:<30} {payload - boot - ticks / TICKS:.1f} s from the batch process's start to the payload's")


def running_cost(bed: SlurmBed, home: Path, seconds: float = 30.0) -> None:
    run, _ = start(home, "long", gpus=0, steps=100_000)
    runs.wait_for(lambda: runs.step(run) >= 1, "step 1", 60)
    pids = [pid for pid in _python_pids(run) if pid not in processes.marked([runs.records(run)[-1].mark])]
    before = sum(_cpu(pid) for pid in pids)
    time.sleep(seconds)
    used = sum(_cpu(pid) for pid in pids) - before
    memory = sum(_pss(pid) for pid in pids)
    share = f"{100 * used / seconds:.2f} % of a core over {seconds:.0f} s"
    print(f"supervisor and guard: {share}, {memory / 1024:.0f} MB (PSS of {len(pids)} processes)")
    bed.cancel_all()


def _python_pids(run: RunFolder) -> list[int]:
    """Batch process and supervisor of ``run``: their command line names its submitit folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run.path / "submitit").encode() in words:
            found.append(int(entry.name))
    return found


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _pss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("Pss:"))


def launch_cost(home: Path) -> None:
    argv = [sys.executable, str(REPOSITORY / "launch.py"), "--preset", "tiny", "--partition", "a800", "--no-follow"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    done = subprocess.run(argv, env=os.environ | {"SLURMLIGHT_HOME": str(home)}, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wall = time.monotonic() - begin
    print(f"launch.py to job accepted: {cpu:.2f} s CPU, {wall:.2f} s wall, exit code {done.returncode} {done.stderr}")


def main() -> None:
    home = Path(tempfile.mkdtemp(prefix="bench-"))
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    try:
        with SlurmBed(grace=10, slurmd_timeout=10, kill_wait=10) as bed:
            os.environ.update(bed.env)
            launch_cost(home)
            bed.cancel_all()
            running_cost(bed, home)
            steps_lost(bed, home)
            bed.cancel_all()
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
