"""A command inside the run's container: ``check`` once on the node, then ``wrap`` each command, ``cleanup`` at the end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from slurmlight.cluster import binds, command, image
from slurmlight.cluster.ports import CACHES
from slurmlight.cluster.runtimes import ADAPTERS, FORMS, PROGRAMS, Call, leftovers
from slurmlight.errors import UserError, unknown_name
from slurmlight.plan import JobPlan

IMAGE_PYTHON = "python"  # what a command that starts with the host's Python starts with inside; by the image's own PATH
IMAGE_PATH = "/opt/slurmlight/bin:/usr/local/bin:/usr/bin:/bin"  # where no converter left the image's ENV
HELP_DEADLINE_S = 10.0
REMOVE_DEADLINE_S = 60.0

# What every payload gets of the host's environment beside the names it asks for; nothing secret among them.
ALWAYS = (
    "CUDA_VISIBLE_DEVICES",
    "LANG",
    "OMP_NUM_THREADS",
    "PYTHONFAULTHANDLER",
    "SLURMLIGHT_ATTEMPT",
    "SLURMLIGHT_MARK",
    "SLURMLIGHT_RUN",
    "SLURMD_NODENAME",
    "SLURM_CPUS_PER_TASK",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_RESTART_COUNT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TZ",
)
PREFIXES = ("SLURMLIGHT_", "NCCL_", "GLOO_", "VLLM_", "RAY_")

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def wrap(
    plan: JobPlan,
    argv: Sequence[str],
    attempt: int,
    env_names: Iterable[str] = (),
    *,
    role: str = "payload",
    launcher: Sequence[str] = (),
    temp: str = "",
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """``argv`` as it runs in the plan's container on this node; ``argv`` itself where the plan has none.

    A command of the host's Python becomes one of the image's. ``env_names`` are passed through besides ALWAYS and the
    plan's own. ``role`` tells containers of one attempt apart (payload, ray ...). ``launcher`` is an srun command line in
    front. ``temp`` is the job's temporary folder on the node: bound, TMPDIR and HOME inside. ``environ`` is read for names,
    Slurm's GPU numbers and cache folders; the values of names never get into the argv.

    Raises UserError as ``check`` does where the runtime is not known yet.
    """
    runtime, path = resolve(plan)
    if runtime == "none":
        return [*launcher, *argv]
    prefixed = sorted(name for name in environ if name.startswith(PREFIXES) and _NAME.match(name))
    names = [_env_name(name) for name in dict.fromkeys((*ALWAYS, *plan.env_names, *env_names, *prefixed))]
    names = [name for name in names if name not in ("HOME", "TMPDIR")]
    passed = {name for name in names if name in environ}
    scratch = [temp, *(environ.get(name, "") for name in CACHES)]
    gpu_ids = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    call = Call(
        image=str(path or plan.image),
        name=container_name(plan, attempt, role),
        command=(IMAGE_PYTHON if argv[0] in (sys.executable, plan.payload[0]) else argv[0], *argv[1:]),
        binds=binds.of_plan(plan, [folder for folder in scratch if os.path.isdir(folder)]),
        env_names=tuple(names),
        workdir=plan.project_folder,
        constants=_constants(plan, temp, passed),
        launcher=tuple(launcher),
        gpus=plan.gpus,
        gpu_ids=tuple(gpu_ids.split(",")) if plan.gpus and re.fullmatch(r"\d+(,\d+)*", gpu_ids) else (),
        cpus=plan.cpus,
        user=(os.getuid(), os.getgid()),
        limits=tuple((name, resource.getrlimit(kind)[1]) for name, kind in LIMITS.items()),
        image_env=_image_env(path, passed) if runtime == "charliecloud" else (),
    )
    return ADAPTERS[runtime](call)


def cleanup(plan: JobPlan, attempt: int, role: str = "payload") -> list[str] | None:
    """The argv that removes what a killed runtime client left behind (podman, docker); None where nothing can be left."""
    return leftovers(resolve(plan)[0], container_name(plan, attempt, role))


def remove(plan: JobPlan, attempt: int, role: str = "payload") -> None:
    """Run ``cleanup`` at the end of an attempt, and for the one before at a start. Never raises."""
    with contextlib.suppress(UserError):
        if argv := cleanup(plan, attempt, role):
            command.run(*argv, deadline_s=REMOVE_DEADLINE_S, check=False)


def record(plan: JobPlan) -> str:
    """Note in the run folder which image this attempt runs in. Returns a warning where the last one ran in another."""
    return image.record(plan, resolve(plan)[0])


def container_name(plan: JobPlan, attempt: int, role: str = "payload") -> str:
    """Unique to run, attempt and role: a requeue on the same node must not meet the last attempt's container."""
    digest = hashlib.sha256(plan.run_folder.encode()).hexdigest()[:6]
    return f"slurmlight-{plan.name}-{digest}-{attempt:03d}-{role}"


def check(plan: JobPlan) -> str:
    """The runtime that will be used. Raises UserError for all that would keep the container from starting on this node.

    Makes the home folder and, for an image folder that is ours, the mount points that are missing in it.
    """
    _check_writable(Path(plan.run_folder))
    for name in plan.env_names:
        _env_name(name)
    runtime, path = resolve(plan)
    if runtime == "none":
        return runtime
    image.check_machine(plan.image, image.form_of(plan.image, path), path, runtime)
    bound = binds.of_plan(plan)
    binds.check(bound, plan.run_folder)
    if runtime == "charliecloud" and path is not None:
        binds.make_mount_points(path, bound)
    Path(plan.run_folder, "home").mkdir(exist_ok=True)
    return runtime


def check_runtime(plan: JobPlan) -> None:
    """Raises UserError for a runtime that cannot be meant, by its name alone: before a submit, too."""
    if plan.runtime and plan.runtime not in ADAPTERS:
        raise unknown_name("container runtime", plan.runtime, ADAPTERS)
    if not plan.image and plan.runtime not in ("", "none"):
        raise UserError(f"runtime '{plan.runtime}' is set but no image", "set 'image', or runtime = \"none\"")


def resolve(plan: JobPlan, which: Callable[[str], str | None] = shutil.which) -> tuple[str, Path | None]:
    """(runtime, path of the image): the plan's own runtime, or the first on this node that can run such an image."""
    check_runtime(plan)
    if not plan.image or plan.runtime == "none":
        return "none", None
    path = image.path_of(plan.image, plan.project_folder)
    able = FORMS[image.form_of(plan.image, path)]
    wanted = [plan.runtime] if plan.runtime else list(able)
    if plan.runtime and plan.runtime not in able:
        raise UserError(
            f"{plan.runtime} cannot run image {plan.image}",
            f"use one of {', '.join(able)}, or convert it with 'slurmlight image convert'",
        )
    for runtime in wanted:
        if which(PROGRAMS[runtime]) and (runtime != "pyxis" or _has_pyxis()):
            return runtime, path
    raise UserError(
        f"no container runtime on {platform.node()} for image {plan.image} (looked for {', '.join(wanted)})",
        "add its module to the profile's 'modules', or set 'runtime' to one that is there",
    )


def _has_pyxis() -> bool:
    return "--container-image" in command.run("srun", "--help", deadline_s=HELP_DEADLINE_S, check=False).stdout


def _constants(plan: JobPlan, temp: str, passed: Collection[str]) -> tuple[tuple[str, str], ...]:
    """User site packages and the home folder stay out; both halves run the same kit where the project holds its source.

    The image's own cache folders are read-only under most runtimes, so those not ``passed`` from outside move as well.
    """
    home = str(Path(plan.run_folder, "home"))
    pairs = {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "HOME": temp or home, "XDG_CACHE_HOME": f"{temp or home}/.cache"}
    pairs |= {name: f"{temp or home}/.cache/{leaf}" for name, leaf in CACHES.items() if name not in passed}
    if "HF_HOME" not in passed:
        pairs["HF_HOME"] = f"{home}/.cache/huggingface"  # downloads outlive the attempt
    if temp or plan.scratch:
        pairs["TMPDIR"] = temp or plan.scratch
    source = Path(plan.project_folder, "src")
    if (source / "slurmlight").is_dir():
        pairs["PYTHONPATH"] = str(source)
    return tuple(pairs.items())


def _image_env(path: Path | None, passed: Collection[str]) -> tuple[tuple[str, str], ...]:
    found = image.environment(path) or (("PATH", IMAGE_PATH),)
    return tuple((key, value) for key, value in found if key not in passed)


def _env_name(name: str) -> str:
    if not _NAME.match(name):
        raise UserError(f"environment name {name!r} is not a name", "give names only; values come from the environment")
    return name


def _check_writable(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"run folder {folder} cannot be written on {platform.node()} ({reason})",
            "put it on a file system that all nodes mount read-write",
        ) from None
