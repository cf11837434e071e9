"""Ports, temp folders and names that two jobs on one node never share: derived from job id and attempt, then tested."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmlight.errors import UserError

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Variables that name a folder for compiled kernels, and the folder's own name."""
BLOCK = 256
"""Ports of one attempt: 32 for named roles, the others for Ray's workers."""
FLOOR = 10_000  # below it live services: Slurm itself, Ray's and Redis' defaults, databases
LEAST = 1024
DEFAULT_EPHEMERAL = (32_768, 60_999)
SOCKET_LIMIT = 107
"""Bytes of an AF_UNIX path: sun_path has 108 with the closing zero (unix(7))."""
RAY_SOCKET = "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""Ray's longest socket below its temp folder, with a 7-digit pid: 64 bytes."""


class PortError(UserError):
    """No block of ports is free on this node."""


@dataclass(frozen=True)
class Ports:
    """The ports of one attempt, from ``base`` up; no port has two roles. ``vllm`` has one a server (8 GPUs a node)."""

    base: int

    def role(self, offset: int) -> int:
        return self.base + offset

    @property
    def guard(self) -> int:
        """Held by the supervisor itself: tells other jobs on the node that the block is taken."""
        return self.role(0)

    @property
    def ray_head(self) -> int:
        return self.role(1)

    @property
    def ray_client(self) -> int:
        return self.role(2)

    @property
    def ray_node(self) -> dict[str, int]:
        """Options of ``ray start`` for its per-node services. The dashboard itself stays off."""
        names = ("node-manager-port", "object-manager-port", "runtime-env-agent-port", "metrics-export-port")
        agents = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port")
        return {name: self.role(3 + at) for at, name in enumerate((*names, *agents))}

    @property
    def store(self) -> int:
        return self.role(9)

    @property
    def proxy(self) -> int:
        return self.role(10)

    @property
    def rendezvous(self) -> int:
        """torch.distributed's MASTER_PORT."""
        return self.role(11)

    @property
    def vllm(self) -> range:
        return range(self.role(16), self.role(24))

    @property
    def workers(self) -> range:
        """Ray's worker ports; --max-worker-port is the last of them."""
        return range(self.role(32), self.base + BLOCK)

    def named(self) -> dict[str, int]:
        """Every single port by role, the worker range apart."""
        single = {"guard": self.guard, "ray_head": self.ray_head, "ray_client": self.ray_client, **self.ray_node}
        single |= {"store": self.store, "proxy": self.proxy, "rendezvous": self.rendezvous}
        return single | {f"vllm{at}": port for at, port in enumerate(self.vllm)}


@dataclass
class Reservation:
    """A block that is ours while this object is open: its guard port listens. ``notes`` are lines for the log."""

    ports: Ports
    notes: tuple[str, ...]
    _guard: socket.socket

    def close(self) -> None:
        self._guard.close()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reserve(job_id: str | int, attempt: int, ephemeral: tuple[int, int] | None = None) -> Reservation:
    """A block of BLOCK free ports for this attempt, below ``ephemeral`` (default: this machine's range).

    The first choice follows from job id and attempt; a block with a port in use is left for the next one, and a note names
    that port. Raises PortError when all are taken.
    """
    low, high = ephemeral or ephemeral_range()
    notes: list[str] = []
    if low < LEAST + BLOCK:
        notes.append(f"ip_local_port_range {low}-{high} leaves no safe ports: any may be taken by an outgoing connection")
    for ports in candidates(job_id, attempt, low):
        guard = _bind(ports.guard)
        taken = ports.guard if guard is None else _taken(range(ports.base + 1, ports.base + BLOCK))
        if guard is not None and taken is None:
            guard.listen(1)
            return Reservation(ports, tuple(notes), guard)
        if guard is not None:
            guard.close()
        notes.append(f"port {taken} is in use: ports {ports.base}-{ports.base + BLOCK - 1} left to whoever has it")
    raise PortError(f"no {BLOCK} free ports in a row on this node", "see what listens there (ss -ltn), or exclude the node")


def candidates(job_id: str | int, attempt: int, low: int) -> Iterator[Ports]:
    """All blocks below ``low``, this attempt's own first. Where ``low`` leaves none, those up to the usual bound."""
    top = low if low >= LEAST + BLOCK else DEFAULT_EPHEMERAL[0]
    floor = FLOOR if top >= FLOOR + 8 * BLOCK else LEAST
    count = (top - floor) // BLOCK
    first = int.from_bytes(hashlib.sha256(f"{job_id}:{attempt}".encode()).digest()[:8]) % count
    return (Ports(floor + (first + step) % count * BLOCK) for step in range(count))


def ephemeral_range() -> tuple[int, int]:
    """The ports the kernel gives to outgoing connections, from /proc; the usual ones where that cannot be read."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL


def _bind(port: int) -> socket.socket | None:
    """A socket on ``port`` of all addresses; None where another has it. No SO_REUSEADDR: it would hide one that is bound
    but does not listen yet."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        probe.bind(("", port))
        return probe
    except OSError:
        probe.close()
        return None


def _taken(ports: range) -> int | None:
    for port in ports:
        probe = _bind(port)
        if probe is None:
            return port
        probe.close()
    return None


# folders and names


def root(scratch: str) -> Path:
    """Where the folders of jobs are made: the profile's scratch folder, else /tmp (TMPDIR may be on a shared file system)."""
    return Path(scratch or "/tmp")


def job_folder(job_id: str | int, root: Path = Path("/tmp")) -> Path:
    """This job's own node-local folder. Never TMPDIR (it may be long or shared), never /tmp/ray (it may be another's)."""
    return root / f"slurmlight-{os.getuid()}-{job_id}"


def temp_folder(job_id: str | int, attempt: int, root: Path = Path("/tmp")) -> Path:
    """The attempt's temp folder, made with mode 0700: short enough for Ray's sockets.

    Raises UserError where it is too long, cannot be made, or belongs to someone else.
    """
    folder = job_folder(job_id, root)
    check_sockets(folder / str(attempt))
    for path in (folder, folder / str(attempt)):
        _own(path)
    return folder / str(attempt)


def check_sockets(folder: Path | str) -> None:
    """Raises UserError where Ray's sockets below ``folder`` would be longer than the kernel allows (bytes, not letters)."""
    length = len(os.fsencode(folder)) + len(RAY_SOCKET)
    if length > SOCKET_LIMIT:
        room = SOCKET_LIMIT - len(RAY_SOCKET)
        what = f"temp folder {folder} is too long for Ray's sockets: {length} > {SOCKET_LIMIT} bytes"
        raise UserError(what, f"use a folder of at most {room} bytes")


def caches(job_id: str | int, root: Path = Path("/tmp")) -> dict[str, str]:
    """Compile caches by environment name: node-local (NFS makes them race) and per job, so a requeue finds them warm."""
    return {name: str(job_folder(job_id, root) / "cache" / leaf) for name, leaf in CACHES.items()}


def make_caches(job_id: str | int, root: Path = Path("/tmp")) -> dict[str, str]:
    """``caches``, with the folders made. Raises UserError where they cannot be, or the job's folder belongs to someone else."""
    found = caches(job_id, root)
    _own(job_folder(job_id, root))
    _own(job_folder(job_id, root) / "cache")
    for folder in found.values():
        _own(Path(folder))
    return found


def forget(job_id: str | int, root: Path = Path("/tmp")) -> None:
    """Remove the caches of a job that does not come back, and its folder where nothing else is in it. Raises nothing."""
    shutil.rmtree(job_folder(job_id, root) / "cache", ignore_errors=True)
    with contextlib.suppress(OSError):
        job_folder(job_id, root).rmdir()


def container_name(job_id: str | int, attempt: int) -> str:
    """With the attempt: a runtime may still know the container of the one before."""
    return f"slurmlight-{job_id}-{attempt}"


def _own(path: Path) -> None:
    """Make ``path`` with mode 0700, or take it if it is ours; a link or another's folder is refused (/tmp is open to all)."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise UserError(
            f"temp folder {path} cannot be made ({error.strerror})", "free space there, or exclude this node"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(f"temp folder {path} belongs to someone else", "remove it or exclude this node")
