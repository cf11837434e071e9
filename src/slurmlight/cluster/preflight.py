"""Checks before the payload starts: what would waste a start, or ruin the run, is refused with what to do.

Other modules add theirs: ``@preflight.check`` on a function of (plan, folder) that raises UserError (nothing helps but a
person) or BadNode (another node may do).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slurmlight.errors import UserError
from slurmlight.files import read_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder

PROBE_BYTES = 1 << 20

type Check = Callable[[JobPlan, RunFolder], None]
_checks: list[Check] = []


class BadNode(UserError):
    """This node cannot run the payload; another one may."""


def check(function: Check) -> Check:
    """Add ``function`` to the checks; they run in the order they were added."""
    _checks.append(function)
    return function


def run(plan: JobPlan, folder: RunFolder) -> None:
    """Run every check. Raises the first UserError."""
    for function in _checks:
        function(plan, folder)


@check
def writable(plan: JobPlan, folder: RunFolder) -> None:
    """The run folder takes a file. Tried, not asked: quotas and full disks do not show in permissions or statvfs."""
    probe = folder.path / f".probe.{os.getpid()}"
    try:
        with open(probe, "wb") as file:
            file.write(b"\0" * PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        mend = "free space there (slurmlight checkpoints RUN shows what is kept), then launch the run again"
        raise UserError(f"run folder {folder.path} cannot be written: {error.strerror}", mend) from None
    finally:
        probe.unlink(missing_ok=True)


@check
def payload_exists(plan: JobPlan, folder: RunFolder) -> None:
    """Outside a container the payload's program and folder must be here."""
    if plan.image:
        return
    if not Path(plan.project_folder).is_dir():
        raise BadNode(f"project folder {plan.project_folder} does not exist on this node", "use a folder all nodes share")
    program = Path(plan.payload[0])
    if program.is_absolute() and not os.access(program, os.X_OK):
        raise BadNode(f"{program} does not exist on this node", "set the kit up in a folder all nodes share")


@check
def scratch_is_there(plan: JobPlan, folder: RunFolder) -> None:
    """The node's folder for temporary files and caches, where the profile names one."""
    if plan.scratch and not os.access(plan.scratch, os.W_OK | os.X_OK):
        mend = "mend scratch in the profile, or have it made on the node"
        raise BadNode(f"scratch folder {plan.scratch} cannot be written on this node", mend)


@check
def gpus_are_free(plan: JobPlan, folder: RunFolder) -> None:
    """The GPUs that Slurm bound are those asked for, and nobody else's processes hold their memory."""
    if plan.gpus and plan.cluster == "slurm":
        from slurmlight.cluster import gpus

        try:
            gpus.settle(plan.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        except gpus.GpuError as error:
            raise BadNode(error.what, error.mend) from None


@check
def container_starts(plan: JobPlan, folder: RunFolder) -> None:
    """Runtime, image, processor and binds, before anything takes the GPUs."""
    if plan.image or plan.runtime not in ("", "none"):
        from slurmlight.cluster import container

        container.check(plan)


BLOCKING = ("pairs", "driver", "disk")  # the doctor's errors that no start survives; the rest is told


@check
def doctor_is_content(plan: JobPlan, folder: RunFolder) -> None:
    """On GPUs: the known faults of packages, driver and disk, which would end the payload minutes later."""
    config = read_json(folder.config) or {}
    if not plan.gpus or config.get("engine", {}).get("stack") not in ("seed", "current"):
        return
    from slurmlight.doctor import examine

    for found in examine.examine(examine.subject(None, folder)):
        if found.severity == "error" and found.check in BLOCKING:
            raise UserError(f"{found.what}: {found.why}", found.mend)
        if found.severity != "ok":
            print(f"doctor: {found.check}: {found.what}; {found.mend}", flush=True)
