"""Where the time of the tiny job goes:  make bench-tiny   (or .venv/bin/python bench/bench_tiny.py [pool|step])

pool: the runner pool against a policy that answers at once: episodes a second, and whose CPU that costs.
step: one GRPO step of the tiny preset by the engine, and by the same policy in one process without gateway and agent.
Warm-starts a policy in a temporary folder (about a minute) unless models/tiny is there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from slurmlight import presets
from slurmlight.data import toy
from slurmlight.data.tasks import load_tasks
from slurmlight.presets import Preset
from slurmlight.train.rollouts.children import Child, free_port
from slurmlight.train.rollouts.play import Job, Playground
from slurmlight.train.rollouts.service import RolloutService
from slurmlight.train.rollouts.sql_row import to_row

EPISODES = 400
CALLS = 3


def main() -> None:
    asked = sys.argv[1:] or ["pool", "step"]
    with tempfile.TemporaryDirectory(prefix="bench-tiny-") as folder:
        if "pool" in asked:
            bench_pool(Path(folder))
        if "step" in asked:
            from bench_step import bench_step

            bench_step(Path(folder))


def bench_pool(folder: Path) -> None:
    """Three calls an episode: the instant policy never answers with SQL that runs, so that the agent uses all its turns."""
    toy.ensure(folder / "data")
    preset = presets.load("tiny", [f"data.train_files={folder}/data/train.parquet", "agent.max_turns=3"])
    run = write_run(folder / "pool", preset)
    tasks = load_tasks(folder / "data/train.parquet", instances=preset.data.instances)[:EPISODES]
    with ExitStack() as stack:
        port = free_port()
        command = [sys.executable, str(Path(__file__).with_name("instant_policy.py")), str(port)]
        policy = Child("instant policy", command, run / "policy.log")
        stack.callback(policy.stop)
        service = stack.enter_context(RolloutService(run, preset, run))
        service.gateway.api.register_model(preset.actor_rollout_ref.model.path, f"http://127.0.0.1:{port}/v1")
        playground = Playground(service.gateway, service.pool, max_failed_share=0.01, watch=lambda: None)
        jobs = [Job(f"e{index}", to_row(task) | {"seed": index}, learns=True) for index, task in enumerate(tasks)]
        playground.play(jobs[:32])  # imports, connections, compiled graph
        children = {"gateway": [service.gateway.child], "runners": service.pool.runners, "policy": [policy]}
        before = {name: cpu(found) for name, found in children.items()} | {"trainer": own_cpu()}
        started = time.perf_counter()
        played = playground.play([Job(f"m{job.name}", job.input, True) for job in jobs])
        seconds = time.perf_counter() - started
        after = {name: cpu(found) for name, found in children.items()} | {"trainer": own_cpu()}
    calls = sum(len(one.calls) for one in played)
    assert calls == CALLS * len(jobs), calls
    print(f"pool: {len(jobs) / seconds:.1f} episodes/s ({len(jobs)} episodes of {CALLS} calls in {seconds:.1f} s)")
    for name, value in after.items():
        spent = value - before[name]
        print(f"  {name:8} {spent:6.2f} CPU-s  {1000 * spent / len(jobs):6.2f} ms an episode  {spent / seconds:5.0%} of a core")


def write_run(folder: Path, preset: Preset) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(presets.to_json(preset)))
    return folder


def cpu(children: list[Child]) -> float:
    times = [psutil.Process(child.process.pid).cpu_times() for child in children]
    return sum(one.user + one.system for one in times)


def own_cpu() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
