"""Container runtimes: one pure adapter each turns a Call (image, binds, environment names, command) into an argv.

Environment values never appear in an argv, only names: another user's ``ps`` would show them. The exceptions are the few
constants of ``Call.constants``, which hold nothing secret.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bind:
    """A host folder or file and where the container sees it."""

    source: str
    target: str
    read_only: bool = False

    def spelled(self) -> str:
        return f"{self.source}:{self.target}" + ":ro" * self.read_only


@dataclass(frozen=True)
class Call:
    """One command to run in one container, free of any runtime's spelling.

    ``launcher`` is an srun command line put in front (empty: none); pyxis adds its own flags to it. ``gpu_ids`` are the
    node's global GPU numbers where Slurm told them: podman and docker start their containers outside the job's cgroup, which
    would otherwise number the GPUs differently. ``limits`` are this process's hard limits, for podman. ``image_env`` is the
    image's own ENV where the runtime does not apply it.
    """

    image: str
    name: str
    command: tuple[str, ...]
    binds: tuple[Bind, ...]
    env_names: tuple[str, ...]
    workdir: str
    constants: tuple[tuple[str, str], ...] = ()
    launcher: tuple[str, ...] = ()
    gpus: int = 0
    gpu_ids: tuple[str, ...] = ()
    cpus: int = 1
    user: tuple[int, int] = (0, 0)
    limits: tuple[tuple[str, int], ...] = ()
    image_env: tuple[tuple[str, str], ...] = field(default=(), repr=False)


PODMAN_NPROC = 32768  # podman 4.3 cannot give a container more (measured as root without CAP_SYS_RESOURCE)

Adapter = Callable[[Call], list[str]]


def _inside(call: Call) -> list[str]:
    """The command with its constants; ``env`` execs in place, so signals still reach the payload itself."""
    if not call.constants:
        return list(call.command)
    return ["env", *(f"{key}={value}" for key, value in call.constants), *call.command]


def none(call: Call) -> list[str]:
    return [*call.launcher, *call.command]


def _singularity_family(program: str, prefix: str) -> Adapter:
    """apptainer and singularity: --cleanenv keeps the host's environment out, PREFIX_NAME variables pass names through.

    No --compat, --containall or --pid: with a PID namespace the payload is PID 1 and ignores TERM.
    """

    def adapter(call: Call) -> list[str]:
        passing = "; ".join(f'[ -z "${{{name}+x}}" ] || export {prefix}_{name}="${name}"' for name in call.env_names)
        shell = ["sh", "-c", f'{passing}; exec "$@"', program] if passing else []
        binds = [part for bind in call.binds for part in ("--bind", bind.spelled())]
        gpu = ["--nv"] if call.gpus else []
        options = ["exec", "--cleanenv", "--no-home", *gpu, *binds, "--pwd", call.workdir]
        return [*call.launcher, *shell, program, *options, call.image, *_inside(call)]

    return adapter


def pyxis(call: Call) -> list[str]:
    """srun's container flags (NVIDIA pyxis). srun itself picks the GPUs, so there is no GPU flag."""
    launcher = call.launcher or (
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={call.cpus}",  # since Slurm 22.05 srun does not take it over from sbatch
        "--overlap",
        "--unbuffered",
        "--kill-on-bad-exit=1",
    )
    names = ",".join(call.env_names)
    enroot_needs = ("HOME", "PATH", "USER", "XDG_RUNTIME_DIR")  # for its own folders; inside, the image's own values win
    return [
        *launcher,
        f"--export={','.join((*enroot_needs, *call.env_names))}",
        f"--container-image={call.image}",
        f"--container-name={call.name}",
        f"--container-mounts={','.join(bind.spelled() for bind in call.binds)}",
        f"--container-workdir={call.workdir}",
        *([f"--container-env={names}"] if names else []),
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--no-container-entrypoint",
        *_inside(call),
    ]


def enroot(call: Call) -> list[str]:
    mounts = [f"--mount={bind.source}:{bind.target}" + ":ro" * bind.read_only for bind in call.binds]
    hooks = ["ENROOT_MOUNT_HOME=n", f"NVIDIA_VISIBLE_DEVICES={'all' if call.gpus else 'void'}"]
    names = [f"--env={name}" for name in call.env_names]
    there = ["sh", "-c", 'cd "$0" && exec "$@"', call.workdir]
    start = ["env", *hooks, "enroot", "start", "--rw", *mounts, *names, call.image]
    return [*call.launcher, *start, *there, *_inside(call)]


def podman(call: Call) -> list[str]:
    devices = [f"--device=nvidia.com/gpu={number}" for number in call.gpu_ids or ("all",)] if call.gpus else []
    own = ["--userns=keep-id"] if call.user[0] else []  # rootful podman has no keep-id
    # podman's defaults are above the hard limits of many nodes, and then it refuses to start
    capped = [(name, PODMAN_NPROC if name == "nproc" and not 0 <= hard < PODMAN_NPROC else hard) for name, hard in call.limits]
    limits = [f"--ulimit={name}={hard}:{hard}" for name, hard in capped]
    return _oci(
        call, ["podman", "run", "--replace", *own, "--pids-limit=-1", "--security-opt=label=disable", *limits, *devices]
    )


def docker(call: Call) -> list[str]:
    gpu = [f'--gpus="device={",".join(call.gpu_ids)}"' if call.gpu_ids else "--gpus=all"] if call.gpus else []
    return _oci(call, ["docker", "run", "--init", "--ulimit=memlock=-1", *gpu])


def _oci(call: Call, start: list[str]) -> list[str]:
    names = [f"--env={name}" for name in call.env_names if not (call.gpu_ids and name == "CUDA_VISIBLE_DEVICES")]
    if call.gpus and call.gpu_ids:  # only these devices are in the container, numbered from 0
        names.append(f"--env=CUDA_VISIBLE_DEVICES={','.join(str(index) for index in range(len(call.gpu_ids)))}")
    return [
        *call.launcher,
        *start,
        "--rm",
        "--pull=never",  # a job must not wait for a registry; check() has said that the image is here
        f"--name={call.name}",
        f"--user={call.user[0]}:{call.user[1]}",
        "--network=host",
        "--ipc=host",  # NCCL and torch share memory through /dev/shm; the runtime's own is 64 MB
        *(f"--volume={bind.spelled()}" for bind in call.binds),
        *names,
        f"--workdir={call.workdir}",
        "--entrypoint=",
        call.image,
        *_inside(call),
    ]


def charliecloud(call: Call) -> list[str]:
    """ch-run execs in place: signals reach the payload and nothing is left behind. It has no GPU flag and no read-only bind."""
    keep = "|".join(call.env_names) or "-"
    image_env = [f"--set-env={key}={value}" for key, value in call.image_env]
    binds = [f"--bind={bind.source}:{bind.target}" for bind in call.binds]
    options = [f"--unset-env=!({keep})", "--env-no-expand", *image_env, *binds, f"--cd={call.workdir}"]
    user = ["env", "USER=" + str(call.user[0])]  # ch-run refuses to start without USER, which batch jobs may lack
    return [*call.launcher, *user, "ch-run", *options, call.image, "--", *_inside(call)]


ADAPTERS: dict[str, Adapter] = {
    "apptainer": _singularity_family("apptainer", "APPTAINERENV"),
    "singularity": _singularity_family("singularity", "SINGULARITYENV"),
    "pyxis": pyxis,
    "enroot": enroot,
    "podman": podman,
    "docker": docker,
    "charliecloud": charliecloud,
    "none": none,
}

PROGRAMS = {
    "apptainer": "apptainer",
    "singularity": "singularity",
    "pyxis": "srun",
    "enroot": "enroot",
    "podman": "podman",
    "docker": "docker",
    "charliecloud": "ch-run",
}

# which runtimes can run which form of image, best first
FORMS: dict[str, tuple[str, ...]] = {
    "sif": ("apptainer", "singularity"),
    "squashfs": ("pyxis", "enroot", "apptainer", "singularity"),
    "folder": ("charliecloud", "apptainer", "singularity"),
    "reference": ("podman", "docker", "pyxis"),
}


def leftovers(runtime: str, name: str) -> list[str] | None:
    """The argv that removes container ``name`` where the runtime leaves it behind when its client is killed; None else."""
    if runtime == "podman":
        return ["podman", "rm", "--force", "--ignore", "--time=10", name]
    return ["docker", "rm", "--force", name] if runtime == "docker" else None
