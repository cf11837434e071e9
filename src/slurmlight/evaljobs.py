"""The job of an evaluation: submitted and followed, or run inside a job that sbatch started (slurm/eval.sbatch)."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from slurmlight import evaluating, launching
from slurmlight import plan as plans
from slurmlight.cluster import container, slurm
from slurmlight.cluster.states import plain_reason
from slurmlight.errors import UserError
from slurmlight.evaluate.config import EvalConfig, complete
from slurmlight.evaluating import Asked, known_as
from slurmlight.files import read_json, write_json
from slurmlight.following import attend, tell
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder, home

EXIT_PARTIAL = 3  # evaluate.main.EXIT_PARTIAL, which this half must not import


def start(config: EvalConfig, plan: JobPlan, why: str, *, fresh: bool, follow: bool) -> int:
    """Submit, or take up what is on its way, and follow it. Returns the exit code: 0 complete, 3 partial."""
    for line in launching.describe(plan, why, []):
        print(line, flush=True)
    under_way = begin(config, plan, fresh=fresh, follow=follow)
    return see_through(plan) if under_way and follow else 0


def begin(config: EvalConfig, plan: JobPlan, *, fresh: bool, follow: bool) -> bool:
    """Submit, or take up what is on its way; False where the evaluation is complete already."""
    from slurmlight.cluster import submit

    folder = RunFolder(plan.run_folder)
    job = _on_its_way(folder, plan)
    if job and not fresh:
        print(f"job       {job} works on evaluation {known_as(folder)} already", flush=True)
        return True
    if job:
        raise UserError(f"{known_as(folder)} is running as job {job}", f"slurmlight cancel {known_as(folder)}")
    evaluating.prepare(config, plan, fresh or evaluating.outdated(config, folder))
    if folder.finished():
        print(f"finished  {folder.path / 'report' / 'report.html'} (--fresh starts over)", flush=True)
        return False
    job = slurm.patiently(lambda: submit.submit(plan, follow=follow), tell)
    after = f" when job {plan.dependency.rpartition(':')[2]} has ended" if plan.dependency else ""
    print(f"job       {job}{after}: slurmlight logs -f {known_as(folder)} | cancel {known_as(folder)}", flush=True)
    return True


def _on_its_way(folder: RunFolder, plan: JobPlan) -> str:
    """The job that works on this evaluation, or will; empty for none. One that waits for another job than ``plan`` does (for
    that of an earlier launch, which has ended) is cancelled: it can never start."""
    job = launching.active_job(folder)
    if not job or not plan.dependency or (read_json(folder.plan) or {}).get("dependency") == plan.dependency:
        return job
    if not plain_reason(slurm.job_state(job).reason).startswith("dependency"):
        return job
    slurm.cancel(job)
    return ""


def see_through(plan: JobPlan) -> int:
    """Follow an evaluation to its end. Returns the exit code."""
    folder = RunFolder(plan.run_folder)
    return code_of(folder, attend(folder, replace(plan, name=known_as(folder))))


def code_of(folder: RunFolder, code: int) -> int:
    """``code``, or 3 where a report is there that lacks questions and nothing else but failure is to be said."""
    if code in (0, 1) and (folder.path / "report" / "summary.json").exists() and not complete(folder.path):
        tell(f"partial: {folder.path / 'report' / 'report.md'} says what is missing; the same command again asks the rest")
        return EXIT_PARTIAL
    return code


def run_here(asked: Asked, flags: dict[str, Any]) -> int:
    """Supervise an evaluation in the job that this process is the batch process of (slurm/eval.sbatch)."""
    from slurmlight.cluster import supervisor

    env = os.environ
    job = env.get("SLURM_JOB_ID")
    if not job:
        raise UserError("no SLURM_JOB_ID: this is not a Slurm job", "sbatch slurm/eval.sbatch, or use slurmlight eval")
    folder = _mine(job) if env.get("SLURM_RESTART_COUNT") else None
    if folder is None:
        config = evaluating.configure(asked)
        given = {key: value for key, value in flags.items() if value} | {
            "partition": env.get("SLURM_JOB_PARTITION", ""),
            "cpus": int(env.get("SLURM_CPUS_ON_NODE", config.training().job.cpus)),
            "env_names": evaluating.env_names(),
        }
        folder = evaluating.folder_of(config, asked.name)
        preset = evaluating.job_preset(config)
        plan = plans.make_plan(
            preset, name=evaluating.job_name(config, folder), project=home(), cluster="slurm", python=sys.executable, **given
        )
        container.check_runtime(plan)
        payload = (sys.executable, "-m", "slurmlight.evaluate.main", str(folder.path))
        evaluating.prepare(config, replace(plan, run_folder=str(folder.path), payload=payload), fresh=False)
        record = {"cluster": "slurm", "job_id": job, "name": env.get("SLURM_JOB_NAME", ""), "submitted": time.time()}
        write_json(folder.job, record)
    return code_of(folder, supervisor.supervise(folder.path))


def _mine(job: str) -> RunFolder | None:
    """The evaluation this job worked on before it was requeued: meanwhile a newer checkpoint may be there."""
    root = home() / "checkpoints"
    for path in sorted([*root.glob("*/eval/*/job.json"), *root.glob("*/job.json")]):
        if str((read_json(path) or {}).get("job_id")) == job and (path.parent / "config.json").exists():
            return RunFolder(path.parent)
    return None
