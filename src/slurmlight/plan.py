"""Preset + flags -> a frozen JobPlan: everything the cluster half must know, nothing of what is learned."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from slurmlight.errors import UserError
from slurmlight.presets import Preset

ClusterName = Literal["slurm", "local"]


@dataclass(frozen=True)
class JobPlan:
    """One job. Folders are absolute; times are seconds unless the name says otherwise; ``payload`` is an argv."""

    name: str
    run_folder: str
    project_folder: str
    cluster: ClusterName
    preset: str
    payload: tuple[str, ...]
    # what it asks of Slurm
    partition: str = ""
    nodes: int = 1
    gpus: int = 0
    gpu_type: str = ""
    cpus: int = 1
    mem: str = ""
    time: str = "24:00:00"
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: str = ""
    dependency: str = ""
    signal_lead_s: int = 120
    # how it looks after itself
    requeue: bool = True
    requeue_cap: int = 50
    first_step_s: int = 1800
    step_s: int = 1200
    # what it runs in
    image: str = ""
    runtime: str = ""
    binds: tuple[str, ...] = ()
    env_names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    scratch: str = ""

    @property
    def gres(self) -> str:
        """The GRES request of a node in sbatch's spelling; empty without GPUs."""
        if not self.gpus:
            return ""
        return f"gpu:{self.gpu_type}:{self.gpus}" if self.gpu_type else f"gpu:{self.gpus}"


def to_json(plan: JobPlan) -> dict[str, Any]:
    return asdict(plan)


def from_json(value: dict[str, Any]) -> JobPlan:
    """A plan as ``to_json`` wrote it. Raises UserError where it does not fit this version of the kit."""
    known = {field.name for field in fields(JobPlan)}
    values: dict[str, Any] = {
        key: tuple(item) if isinstance(item, list) else item for key, item in value.items() if key in known
    }
    try:
        return JobPlan(**values)
    except TypeError as error:
        raise UserError(f"plan.json does not fit this version of slurmlight ({error})", "launch the run again") from None


_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")


def run_name(name: str) -> str:
    """``name`` where it can name a folder and a job; UserError else."""
    if not _NAME.match(name):
        raise UserError(
            f"run name {name!r} cannot name a folder",
            "use letters, digits, '.', '_' and '-', starting with one of the first two",
        )
    return name


def make_plan(preset: Preset, *, name: str, project: Path, cluster: ClusterName, python: str, **asked: Any) -> JobPlan:
    """The plan of ``preset`` for run ``name``; ``asked`` holds the flags a person gave (None: not given)."""
    job = preset.job
    values: dict[str, Any] = {
        key: getattr(job, key)
        for key in ("nodes", "gpus", "gpu_type", "cpus", "mem", "time", "signal_lead_s", "requeue", "requeue_cap")
    }
    values |= {"first_step_s": job.first_step_s, "step_s": job.step_s, "image": job.image}
    values |= {key: value for key, value in asked.items() if value is not None}
    folder = project / "checkpoints" / run_name(name)
    return JobPlan(
        name=name,
        run_folder=str(folder),
        project_folder=str(project),
        cluster=cluster,
        preset=preset.name,
        payload=(python, "-m", "slurmlight.train.main", str(folder)),
        **values,
    )
