"""The node: shared memory, limits, disk, temp path, the run folder's file system, ports."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmlight.cluster import ports
from slurmlight.doctor import Finding
from slurmlight.errors import UserError

GIB = 1 << 30
SHM_LEAST, SHM_GOOD = 1 * GIB, 8 * GIB  # containers' own /dev/shm is 64 MB; NCCL, data loaders and Ray's store share it
NOFILE_GOOD = 65_536  # Ray's documentation asks for it on a head node
NPROC_GOOD = 16_384
LOCAL_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "ramfs", "f2fs"})
BYTES_A_PARAMETER = 12  # verl saves fp32 weights (4) and AdamW's two moments (8)


@dataclass(frozen=True)
class Machine:
    """Facts of this node; bytes. ``soft`` limits are None where unlimited."""

    shm: int
    nofile: int | None
    nproc: int | None
    memlock: int | None


def machine() -> Machine:
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    soft = [resource.getrlimit(kind)[0] for kind in kinds]
    limits = [None if limit == resource.RLIM_INFINITY else limit for limit in soft]
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    return Machine(shm, *limits)


def check_machine(have: Machine, nodes: int = 1) -> Iterator[Finding]:
    """Limits that Ray, vLLM and NCCL run into."""
    if have.shm < SHM_GOOD:
        severity = "error" if have.shm < SHM_LEAST else "warning"
        what = f"/dev/shm has {_size(have.shm)}"
        mend = "--ipc=host or --shm-size=16g for a container, mount -o remount,size=16g /dev/shm for a node"
        yield Finding("shm", severity, what, "NCCL and Ray's object store live there: bus errors when it is full", mend)
    for name, soft, good in (("open files", have.nofile, NOFILE_GOOD), ("processes", have.nproc, NPROC_GOOD)):
        if soft is not None and soft < good:
            flag = "-n" if name == "open files" else "-u"
            why = "Ray and vLLM run out of them with many workers"
            yield Finding("limits", "warning", f"limit of {name} is {soft}, below {good}", why, f"ulimit {flag} {good}")
    if nodes > 1 and have.memlock is not None and have.memlock < 64 * GIB:
        what = f"limit of locked memory is {_size(have.memlock)}"
        yield Finding("limits", "warning", what, "InfiniBand needs it unlimited between nodes", "ulimit -l unlimited")


def check_disk(folder: Path, checkpoint: int, keep: int | None, free: int | None = None) -> Iterator[Finding]:
    """Room for the checkpoints that are kept, and for the one being written before the oldest goes.

    ``checkpoint`` is the size of one in bytes, ``keep`` how many stay (None: all, so at least two are looked for).
    """
    free = shutil.disk_usage(folder).free if free is None else free
    count = (keep or 1) + 1
    if checkpoint and free < count * checkpoint:
        what = f"{_size(free)} free for {count} checkpoints of about {_size(checkpoint)} below {folder}"
        mend = "free space there, lower trainer.max_actor_ckpt_to_keep, or put checkpoints/ on another file system"
        severity = "error" if free < checkpoint else "warning"
        yield Finding("disk", severity, what, "a save that fills the disk is torn and the attempt ends", mend)
    else:
        yield Finding("disk", "ok", f"{_size(free)} free for {count} checkpoints of about {_size(checkpoint)}")


def checkpoint_bytes(run: Path, model: Path) -> int:
    """Size of one checkpoint: the largest there is, else what the model's weights let expect; 0 where nothing is known."""
    sizes = [_folder_bytes(step) for step in run.glob("global_step_*") if step.is_dir()]
    if sizes:
        return max(sizes)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return weights // _bytes_a_weight(model) * BYTES_A_PARAMETER


def _bytes_a_weight(model: Path) -> int:
    from slurmlight.files import read_json

    config = read_json(model / "config.json") or {}
    return 4 if "float32" in str(config.get("dtype") or config.get("torch_dtype")) else 2


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_temp(folder: str) -> Finding:
    """The temp folder that Ray's sockets go into: bytes, not letters."""
    try:
        ports.check_sockets(folder)
    except UserError as error:
        return Finding("temp", "error", error.what, "AF_UNIX path too long: Ray does not start", error.mend)
    return Finding("temp", "ok", f"temp folder {folder} leaves room for Ray's sockets")


def check_shared(folder: Path, mounts: str, job: bool) -> Iterator[Finding]:
    """``mounts`` is /proc/mounts; ``job``: the run is a Slurm job, so other nodes must see its folder too."""
    kind = file_system(folder, mounts)
    if job and kind in LOCAL_KINDS:
        what = f"{folder} is on {kind}, a file system of this node"
        why = "a requeued job may start on another node and would not find its checkpoints"
        yield Finding(
            "run folder", "warning", what, why, "put checkpoints/ (or SLURMLIGHT_HOME) on a file system all nodes mount"
        )
    else:
        yield Finding("run folder", "ok", f"{folder} is on {kind}")


def file_system(folder: Path, mounts: str) -> str:
    """The type of the mount that holds ``folder``; "unknown" where /proc/mounts does not say."""
    found = {line.split()[1].replace("\\040", " "): line.split()[2] for line in mounts.splitlines() if len(line.split()) > 2}
    real = folder.resolve()
    return next((found[str(place)] for place in (real, *real.parents) if str(place) in found), "unknown")


def check_ports(job: str, attempt: int, ephemeral: tuple[int, int] | None = None) -> Iterator[Finding]:
    """Whether a job could have its block of ports now; what was in the way is named."""
    try:
        with ports.reserve(job, attempt, ephemeral) as held:
            first, last, notes = held.ports.base, held.ports.base + ports.BLOCK - 1, held.notes
    except ports.PortError as error:
        yield Finding("ports", "error", error.what, "Ray and the servers cannot listen", error.mend)
        return
    unsafe = [note for note in notes if note.startswith("ip_local_port_range")]
    for note in unsafe:
        mend = "sysctl net.ipv4.ip_local_port_range='32768 60999' (administrator)"
        yield Finding("ports", "warning", note, "a server may find its port taken", mend)
    passed = [note for note in notes if note not in unsafe]
    yield Finding("ports", "ok", "; ".join([f"ports {first}-{last} are free", *passed]))


def _size(count: int) -> str:
    for unit, size in (("TB", 1 << 40), ("GB", GIB), ("MB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count // 1024} kB"
