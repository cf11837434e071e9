"""``slurmlight launch`` (and ``launch.py``): resolve a preset, submit the job, follow it."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slurmlight.chaining import Chained
    from slurmlight.plan import JobPlan
    from slurmlight.presets import Preset


class Cluster(StrEnum):
    auto = "auto"
    slurm = "slurm"
    local = "local"


def register(app: typer.Typer) -> None:
    app.command()(launch)
    app.command()(batch)


def launch(
    preset: Annotated[str, typer.Option(help="preset name or TOML file (see: slurmlight presets)")],
    partition: Annotated[str | None, typer.Option(help="Slurm partition or profile, for instance a800")] = None,
    cluster: Annotated[Cluster, typer.Option(help="auto: Slurm where sbatch answers, else this machine")] = Cluster.auto,
    nodes: Annotated[int | None, typer.Option(min=1)] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs a node")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores a node")] = None,
    mem: Annotated[str | None, typer.Option(help="memory a node, for instance 200G")] = None,
    time: Annotated[str | None, typer.Option(help="time limit: minutes, HH:MM:SS or D-HH:MM:SS")] = None,
    account: Annotated[str | None, typer.Option()] = None,
    qos: Annotated[str | None, typer.Option()] = None,
    constraint: Annotated[str | None, typer.Option()] = None,
    exclude: Annotated[str | None, typer.Option(help="nodes to stay away from")] = None,
    depend: Annotated[str | None, typer.Option(help="run after a job: its id, or afterok:ID, afterany:ID ...")] = None,
    image: Annotated[str | None, typer.Option(help="container image (path or reference)")] = None,
    runtime: Annotated[str | None, typer.Option(help="apptainer, pyxis, podman, docker, charliecloud or none")] = None,
    stack: Annotated[str | None, typer.Option(help="package set of the verl engine: seed or current")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; the preset's by default")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value for any preset key; repeatable")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="move an old run of this name aside and start over")] = False,
    then_eval: Annotated[
        bool, typer.Option("--then-eval", help="evaluate the last step once the training has finished")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print job script and configuration, submit nothing")] = False,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="follow the run to its end")] = True,
) -> None:
    """Train a preset: as a Slurm job that requeues itself, or on this machine."""
    from slurmlight import chaining, launching, presets
    from slurmlight.plan import run_name
    from slurmlight.secrets import forwarded_names
    from slurmlight.tracking.swanlab_mode import choose_mode

    overrides = list(set_ or []) + ([f"engine.stack={stack}"] if stack else [])
    flags = {"job.nodes": nodes, "job.gpus": gpus, "job.time": time}
    overrides += [f"{key}={value}" for key, value in flags.items() if value is not None]
    chosen = presets.load(preset, overrides)
    choose_mode(chosen.trainer.logger, os.environ)  # what SwanLab would refuse on the node is refused here
    run_name(name or chosen.name)
    where, why = launching.choose_cluster(cluster.value, chosen, partition, dry_run)
    asked = {"partition": partition, "account": account, "qos": qos, "constraint": constraint, "exclude": exclude}
    asked |= {"cpus": cpus, "mem": mem, "image": image, "runtime": runtime, "env_names": forwarded_names()}
    if depend:
        asked["dependency"] = launching.dependency(depend, dry_run)
    plan = launching.make_plan(chosen, where, name, dry_run, asked)
    then = chaining.plan_after(plan, chosen, dry_run, asked) if then_eval else None
    if then:
        chaining.check_follow(plan, follow)
    if dry_run:
        launching.check_rewards(plan, chosen)
        _print_dry_run(plan, chosen, why, then)
        return
    if then:
        raise typer.Exit(chaining.start(plan, chosen, why, then, fresh=fresh, follow=follow))
    raise typer.Exit(launching.start(plan, chosen, why, fresh=fresh, follow=follow))


def _print_dry_run(plan: JobPlan, chosen: Preset, why: str, then: Chained | None) -> None:
    import json

    from slurmlight import launching, presets
    from slurmlight import plan as plans
    from slurmlight.cluster.submit import script
    from slurmlight.secrets import redact

    for line in launching.describe(plan, why, presets.warnings(chosen)):
        print(f"# {line}")
    if plan.cluster == "slurm":
        print("\n# ---- job script ----\n" + script(plan).rstrip())
    print("\n# ---- plan ----\n" + redact(json.dumps(plans.to_json(plan), indent=1)))
    print("\n# ---- resolved configuration ----\n" + redact(json.dumps(presets.to_json(chosen), indent=1)))
    if then:
        print("\n# ---- and then, when it has finished ----")
        for line in launching.describe(then.plan, why, []):
            print(f"# {line}")
        if then.plan.cluster == "slurm":
            print("\n# ---- job script of the evaluation (JOB: the id of the job above) ----\n" + script(then.plan).rstrip())
        print("\n# ---- plan of the evaluation ----\n" + redact(json.dumps(plans.to_json(then.plan), indent=1)))


def batch(
    preset: Annotated[str, typer.Option(help="preset name or TOML file")],
    name: Annotated[str | None, typer.Option(help="name of the run; the preset's by default")] = None,
    image: Annotated[str | None, typer.Option(help="container image (path or reference)")] = None,
    runtime: Annotated[str | None, typer.Option(help="container runtime")] = None,
    stack: Annotated[str | None, typer.Option(help="package set of the verl engine: seed or current")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value for any preset key; repeatable")] = None,
) -> None:
    """Train inside a job that sbatch started already (slurm/train.sbatch): what launch submits, without submitting."""
    from slurmlight import launching, presets
    from slurmlight.tracking.swanlab_mode import choose_mode

    overrides = list(set_ or []) + ([f"engine.stack={stack}"] if stack else [])
    chosen = presets.load(preset, overrides)
    choose_mode(chosen.trainer.logger, os.environ)  # what SwanLab would refuse on the node is refused here
    raise typer.Exit(launching.run_here(chosen, name, {"image": image, "runtime": runtime}))
