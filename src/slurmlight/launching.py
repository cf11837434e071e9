"""From a person's flags to a run folder with a plan in it: which cluster, which partition, a new run or an old one."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmlight import plan as plans
from slurmlight import presets
from slurmlight.cluster import container, gres, guard, profiles, slurm
from slurmlight.cluster.command import CommandError
from slurmlight.cluster.states import State
from slurmlight.errors import UserError, unknown_name
from slurmlight.files import read_json, write_json
from slurmlight.following import attend, tell
from slurmlight.modelversion import check_for_seed
from slurmlight.plan import ClusterName, JobPlan
from slurmlight.presets import Preset, rules
from slurmlight.rewards.user import look_at
from slurmlight.runfolder import RunFolder, find_run, home, readable
from slurmlight.secrets import forwarded_names
from slurmlight.train import checkpoints

# Keys that may differ from the run's first launch: they say how far and where, not what is learned.
FREE_KEYS = (
    "job.",
    "runner.",
    "about",
    "trainer.total_",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.logger",
    "trainer.max_",
    "trainer.keep_",
    "stability.on_alarm",
    "stability.max_fallbacks",
)


def slurm_answers() -> bool:
    """Whether sbatch is here and a controller behind it says so within seconds."""
    try:
        return shutil.which("sbatch") is not None and slurm.call("scontrol", "ping", deadline_s=5).code == 0
    except CommandError:
        return False


def choose_cluster(asked: str, preset: Preset, partition: str | None, dry: bool) -> tuple[ClusterName, str]:
    """Slurm or this machine, and why. Raises UserError where the job cannot run on what there is."""
    if asked == "slurm" or asked == "local":
        return asked, "as asked"
    if partition or (dry and preset.job.gpus):
        return "slurm", "a partition is named" if partition else f"preset {preset.name} needs GPUs"
    if slurm_answers():
        return "slurm", "sbatch answers here"
    if preset.job.gpus:
        raise UserError(
            f"preset {preset.name} needs {preset.job.gpus} GPUs a node and no Slurm answers here",
            "run this on a login node, add --cluster local on a GPU machine, or try --preset tiny",
        )
    return "local", "no Slurm answers here"


def make_plan(preset: Preset, cluster: ClusterName, name: str | None, dry: bool, flags: dict[str, Any]) -> JobPlan:
    """Flags win over the partition's profile, the profile over the preset. A dry run asks Slurm only where it answers.

    Raises UserError for flags that cannot be meant.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    limit = given.get("time", preset.job.time)
    for error in (*rules.memory("--mem", given.get("mem", "")), *rules.time_limit("--time", limit)):
        raise error
    if cluster == "slurm":
        given = _on_partition(preset, dry, given)
    plan = plans.make_plan(preset, name=name or preset.name, project=home(), cluster=cluster, python=sys.executable, **given)
    container.check_runtime(plan)
    return plan


def _on_partition(preset: Preset, dry: bool, given: dict[str, Any]) -> dict[str, Any]:
    asked = given.get("partition")
    known = profiles.load_all()
    live = slurm.patiently(slurm.partitions, tell) if not dry or slurm_answers() else ()
    profile = (
        profiles.load(asked) if asked and (asked in known or any(one.partition == asked for one in known.values())) else None
    )
    partition = (profile.partition or profile.name) if profile else asked or next(iter(live), "")
    if partition and partition not in (live or [partition] * bool(profile)):
        raise unknown_name("partition", partition, live or known)
    merged: dict[str, Any] = (profile.defaults(preset.engine.stack) if profile else {}) | given | {"partition": partition}
    merged["env_names"] = tuple(sorted({*merged.get("env_names", ()), *(profile.env_names if profile else ())}))
    if profile:
        profile.check(preset.job.gpus, merged.get("cpus", 0))
    if live and preset.job.gpus:
        offered = slurm.partition_gres(partition)
        merged["gpu_type"] = gres.fit(partition, offered, preset.job.gpus, merged.get("gpu_type", ""))
    return merged


def dependency(text: str, dry: bool) -> str:
    """``--depend`` in sbatch's spelling: a job id or run name means afterok. The parent must be known to Slurm: 22.05 accepts
    an unknown id and starts the job at once."""
    kind, _, parent = text.rpartition(":")
    if not parent.replace("_", "").isdigit():
        run = find_run(parent)
        with readable(run):
            record = read_json(run.job) or {}
        parent = str(record.get("job_id", ""))
    return f"{kind or 'afterok'}:{parent if dry else slurm.require_parent(parent)}"


def prepare(plan: JobPlan, preset: Preset, fresh: bool) -> RunFolder:
    """The run folder of ``plan``, made or taken up again. Raises UserError where it holds another configuration."""
    run = RunFolder(plan.run_folder)
    if fresh and run.path.exists():
        move_aside(run.path)
    before, now = read_json(run.config), presets.to_json(preset)
    if before is not None:
        changed = _changes(_flat(before), _flat(now))
        kept = [key for key in changed if not key.startswith(FREE_KEYS)]
        if kept:
            what = ", ".join(f"{key}: {_flat(before).get(key)!r} -> {_flat(now).get(key)!r}" for key in kept[:3])
            raise UserError(
                f"run '{plan.name}' was started with another configuration ({what})",
                "give it another --name, or --fresh to move the old run aside and start over",
            )
        if any(key.startswith("trainer.total_") for key in changed):
            (run.path / "finished.json").unlink(missing_ok=True)
    try:
        run.attempts.mkdir(parents=True, exist_ok=True)
        (run.path / "outcome.json").unlink(missing_ok=True)  # that of an earlier job says nothing of this one
        write_json(run.config, now)
        write_json(run.plan, plans.to_json(plan))
    except OSError as error:
        raise UserError(
            f"run folder {run.path} cannot be written ({error.strerror})",
            "free space or permissions there, or use another SLURMLIGHT_HOME",
        ) from None
    return run


def move_aside(path: Path) -> None:
    """Rename a folder to the first free NAME~1, NAME~2 ..."""
    number = 1
    while (aside := path.with_name(f"{path.name}~{number}")).exists():
        number += 1
    path.rename(aside)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: item for name, inner in value.items() for key, item in _flat(inner, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): value}


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))


def describe(plan: JobPlan, why: str, warnings: Sequence[str]) -> list[str]:
    """The plan in a few lines for people."""
    where = "this machine" if plan.cluster == "local" else f"Slurm, partition {plan.partition or '(default)'}"
    size = f"{plan.nodes} x {plan.gres or str(plan.cpus) + ' CPU cores'}"
    lines = [f"run       {plan.name}  ({plan.run_folder})", f"cluster   {where} ({why}): {size}, limit {plan.time}"]
    if plan.image:
        lines.append(f"image     {plan.image}")
    return lines + [f"warning   {text}" for text in warnings]


def start(plan: JobPlan, preset: Preset, why: str, *, fresh: bool, follow: bool) -> int:
    """Submit the run, or take up the one that is on its way, and follow it. Returns the exit code."""
    begin(plan, preset, why, fresh=fresh, follow=follow)
    return attend(RunFolder(plan.run_folder), plan) if follow else 0


def begin(plan: JobPlan, preset: Preset, why: str, *, fresh: bool, follow: bool) -> str:
    """Submit the run, or take up the one that is on its way. Returns the id of its job."""
    from slurmlight.cluster import submit

    run = RunFolder(plan.run_folder)
    for line in describe(plan, why, presets.warnings(preset)):
        print(line, flush=True)
    with readable(run):
        job = active_job(run)
        if job and not fresh:
            print(f"job       {job} works on this run already; following it", flush=True)
            return job
        if job:
            raise UserError(
                f"run '{plan.name}' is running as job {job}", f"slurmlight cancel {plan.name}, or give another --name"
            )
        check_inputs(plan, preset)
        if not fresh:
            check_resume(plan, run)
        prepare(plan, preset, fresh)
    job = slurm.patiently(lambda: submit.submit(plan, follow=follow), tell)
    print(f"job       {job}: slurmlight logs -f {plan.name} | status {plan.name} | cancel {plan.name}", flush=True)
    return job


def active_job(run: RunFolder) -> str:
    """The id of the job that works on ``run`` or waits to; empty where there is none."""
    record = read_json(run.job) or {}
    if record.get("cluster") == "slurm":
        seen = slurm.job_state(str(record.get("job_id")))
        return "" if seen.final or seen.state in (State.GONE, State.UNKNOWN) else seen.job
    pid = guard.living(run)
    return f"local-{pid}" if pid else ""


def check_inputs(plan: JobPlan, preset: Preset) -> None:
    """Raises UserError, before anything is submitted, for files that the payload would miss hours later."""
    check_rewards(plan, preset)
    project = Path(plan.project_folder)
    if preset.warmstart is not None:
        from slurmlight.data.toy import refuse_others

        refuse_others(project / preset.data.train_files)
        return  # data and policy of the tiny preset are made by the run itself
    for key, value in (("data.train_files", preset.data.train_files), ("data.val_files", preset.data.val_files)):
        if not (project / value).exists():
            raise UserError(f"{key}: {project / value} does not exist", "make it with: slurmlight data spider --from DIR")
    model = preset.actor_rollout_ref.model.path
    if not (project / model / "config.json").exists():
        raise UserError(f"model folder {project / model} has no config.json", "fetch it with: slurmlight model fetch")
    if preset.engine.stack == "seed":
        check_for_seed(project / model)


def check_rewards(plan: JobPlan, preset: Preset) -> None:
    """Raises UserError for a reward of one's own whose file is missing or has no such function."""
    for part in preset.reward:
        if part.file:
            look_at(Path(plan.project_folder) / part.file, part.name)


def check_resume(plan: JobPlan, run: RunFolder) -> None:
    """Raises UserError where the payload would refuse the run's checkpoints: none complete, or of another number of GPUs."""
    if run.finished() is None:
        world_size = max(plan.gpus, 1) * plan.nodes
        checkpoints.choose(checkpoints.scan(run.path, world_size), world_size, checkpoints.read_tracker(run.path))


def run_here(preset: Preset, name: str | None, flags: dict[str, Any]) -> int:
    """Supervise ``preset`` in the job that this process is the batch process of; its size is what Slurm gave it."""
    from slurmlight.cluster import supervisor

    env = os.environ
    job = env.get("SLURM_JOB_ID")
    if not job:
        raise UserError("no SLURM_JOB_ID: this is not a Slurm job", "sbatch slurm/train.sbatch, or use launch.py")
    flags = {key: value for key, value in flags.items() if value} | {
        "partition": env.get("SLURM_JOB_PARTITION", ""),
        "nodes": int(env.get("SLURM_JOB_NUM_NODES", 1)),
        "cpus": int(env.get("SLURM_CPUS_ON_NODE", preset.job.cpus)),
        "env_names": forwarded_names(),
    }
    if profile := profiles.load_all().get(flags["partition"]):
        flags = profile.defaults(preset.engine.stack) | flags
    plan = plans.make_plan(preset, name=name or preset.name, project=home(), cluster="slurm", python=sys.executable, **flags)
    container.check_runtime(plan)
    check_inputs(plan, preset)
    run = prepare(plan, preset, fresh=False)
    record = {"cluster": "slurm", "job_id": job, "name": env.get("SLURM_JOB_NAME", ""), "submitted": time.time()}
    write_json(run.job, record)
    return supervisor.supervise(run.path)
