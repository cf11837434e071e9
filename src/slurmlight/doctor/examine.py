"""All checks of one examination, in order: gathers the facts each one needs, and survives a check that cannot be made."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmlight import plan as plans
from slurmlight import presets
from slurmlight.cluster import container, gpus, ports
from slurmlight.doctor import Finding, flash, gpu, libraries, machine, packages
from slurmlight.errors import UserError
from slurmlight.files import read_json
from slurmlight.modelversion import check_for_seed
from slurmlight.plan import JobPlan
from slurmlight.presets import Preset
from slurmlight.runfolder import RunFolder, readable

STACKS = ("tiny", "seed", "current")


@dataclass(frozen=True)
class Subject:
    """What is examined: a stack in this Python (empty: none is here), and the run it is for, if any."""

    stack: str
    folder: RunFolder | None = None
    plan: JobPlan | None = None
    preset: Preset | None = None

    @property
    def contained(self) -> bool:
        """The packages are in the plan's image, not in this Python."""
        return bool(self.plan and self.plan.image) and not Path(sys.prefix, "image.json").exists()


def subject(stack: str | None, folder: RunFolder | None) -> Subject:
    """From the flags; the stack is that of the run, else what this Python has. Raises UserError for a folder without a plan."""
    if folder is None:
        return Subject(stack or _stack_here())
    with readable(folder):
        plan, config = read_json(folder.plan), read_json(folder.config)
    if plan is None or config is None:
        raise UserError(f"run folder {folder.path} holds no plan", "launch the run first, or leave --run out")
    preset = presets.from_json(config)
    return Subject(stack or preset.engine.stack.replace("none", "tiny"), folder, plans.from_json(plan), preset)


def _stack_here() -> str:
    have = packages.installed()
    vllm = packages.number(have.get("vllm", ""))
    if vllm:
        return "seed" if vllm < (0, 12) else "current"
    return "tiny" if "torch" in have else ""


def examine(what: Subject) -> list[Finding]:
    """Every finding, in the order of the checks. A check that fails itself is a finding too, never a traceback."""
    found: list[Finding] = []
    for check in (_container, _packages, _libraries, _flash, _driver, _gpus, _machine, _ports, _folders, _model):
        found += _survive(check, what)
    return found


def _survive(check: Callable[[Subject], Iterable[Finding]], what: Subject) -> list[Finding]:
    try:
        return list(check(what))
    except UserError as error:
        return [Finding(check.__name__.strip("_"), "error", error.what, "the job would not start", error.mend)]
    except OSError as error:
        return [Finding(check.__name__.strip("_"), "warning", f"could not be looked at ({error})", "nothing is known of it")]


def _container(what: Subject) -> Iterator[Finding]:
    if what.plan and what.contained:
        runtime = container.check(what.plan)
        yield Finding("container", "ok", f"{what.plan.image} runs under {runtime}")


def _packages(what: Subject) -> Iterator[Finding]:
    yield packages.check_python(sys.version_info[:3])
    if what.contained or not what.stack:
        return
    have = packages.installed()
    lock = packages.lock_path(what.stack)
    locked = packages.own_pins() if what.stack == "tiny" else packages.read_lock(lock.read_text()) if lock else {}
    if locked:
        yield from packages.check_lock(have, locked, what.stack)
    elif what.stack != "tiny":
        yield Finding("lock", "warning", f"no lock of stack {what.stack} here", "versions cannot be compared")
    yield from packages.check_pairs(have)


def _libraries(what: Subject) -> Iterator[Finding]:
    if not what.contained and what.stack:
        yield from libraries.check(libraries.needs(_site()), libraries.loaded())


def _flash(what: Subject) -> Iterator[Finding]:
    if not what.contained:
        yield from flash.check(*flash.files(_site()), needed=what.stack == "seed")


def _driver(what: Subject) -> Iterator[Finding]:
    built = gpu.torch_cuda(_site())
    if what.stack != "tiny" and not what.contained:
        yield from gpu.check_driver(gpu.driver(), built)
    elif what.contained and what.stack in gpu.STACK_CUDA:
        yield from gpu.check_driver(gpu.driver(), gpu.STACK_CUDA[what.stack])


def _gpus(what: Subject) -> Iterator[Finding]:
    asked = what.plan.gpus if what.plan else 0
    if what.stack == "tiny" and not asked:
        return
    yield from gpu.check_gpus(asked, os.environ.get("CUDA_VISIBLE_DEVICES"), "SLURM_JOB_ID" in os.environ, gpus.query)


def _machine(what: Subject) -> Iterator[Finding]:
    """Limits of this node count where the job runs: for a run, or inside a job (an image is built under others)."""
    if what.stack in ("seed", "current") and (what.plan or "SLURM_JOB_ID" in os.environ):
        yield from machine.check_machine(machine.machine(), what.plan.nodes if what.plan else 1)


def _ports(what: Subject) -> Iterator[Finding]:
    yield from machine.check_ports(os.environ.get("SLURM_JOB_ID", f"doctor-{os.getpid()}"), 1)


def _folders(what: Subject) -> Iterator[Finding]:
    scratch = ports.root(what.plan.scratch if what.plan else "")
    if what.stack != "tiny":
        yield machine.check_temp(str(ports.job_folder(os.environ.get("SLURM_JOB_ID", "1000000"), scratch) / "1"))
    if what.folder and what.plan and what.preset:
        model = Path(what.plan.project_folder, what.preset.actor_rollout_ref.model.path)
        size = machine.checkpoint_bytes(what.folder.path, model)
        yield from machine.check_disk(what.folder.path, size, what.preset.trainer.max_actor_ckpt_to_keep)
        yield from machine.check_shared(what.folder.path, Path("/proc/mounts").read_text(), what.plan.cluster == "slurm")


def _model(what: Subject) -> Iterator[Finding]:
    """The seed stack's transformers 4 and a folder that transformers 5 saved."""
    if what.stack == "seed" and what.plan and what.preset:
        folder = Path(what.plan.project_folder, what.preset.actor_rollout_ref.model.path)
        check_for_seed(folder)
        yield Finding("model", "ok", f"{folder} is not of transformers 5")


def _site() -> list[Path]:
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return [Path(path) for path in paths if path and Path(path).is_dir()]
