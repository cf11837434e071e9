"""The job's GPUs on this node: CUDA_VISIBLE_DEVICES in all its shapes, nvidia-smi's rows, who else is on them."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlight.cluster import command
from slurmlight.cluster.command import CommandError
from slurmlight.errors import UserError

BUSY_MIB = 1024
"""A GPU with more memory in use is someone else's: an idle one shows 0 to a few hundred MiB, a training one tens of GiB."""
WAIT_S = 120.0  # for another job's processes to end: Slurm gives a GPU away before its memory is free
POLL_S = 5.0
SMI_DEADLINE_S = 60.0  # the driver needs many seconds where persistence mode is off

_UUID = re.compile(r"^(GPU|MIG)-[0-9a-fA-F/-]+$")


class GpuError(UserError):
    """This node cannot give the job its GPUs."""


class GpuBusy(GpuError):
    """Another process holds memory of the job's GPUs."""


def visible(value: str | None, wanted: int, *, whole: bool = True) -> tuple[str, ...]:
    """The devices that CUDA_VISIBLE_DEVICES (``value``; None: unset) names: indices, GPU or MIG ids, never int().

    ``wanted`` is what the job asked for on this node, ``whole`` whether it needs whole GPUs. Raises GpuError for anything
    doubtful: it never stands for "all GPUs".
    """
    if wanted == 0 and (value is None or value.strip() in ("", "NoDevFiles")):
        return ()
    if value is None:
        raise GpuError(
            f"the job asked for {wanted} GPUs and CUDA_VISIBLE_DEVICES is unset", "check gres.conf: File= is missing"
        )
    if value.strip() == "NoDevFiles":
        raise GpuError("Slurm bound no GPU to this step (CUDA_VISIBLE_DEVICES=NoDevFiles)", "ask for GPUs with --gres")
    devices = tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    for device in devices:
        if not device.isdecimal() and not _UUID.match(device):
            raise GpuError(f"CUDA_VISIBLE_DEVICES={value!r} is no list of devices", "expected for instance 0,1,2,3")
        if whole and device.startswith("MIG-"):
            raise GpuError(f"{device} is a slice of a GPU and the preset needs whole ones", "ask for another GPU type")
    if len(set(devices)) != len(devices):
        raise GpuError(f"CUDA_VISIBLE_DEVICES={value!r} names a device twice", "check gres.conf on this node")
    if len(devices) != wanted:
        raise GpuError(f"CUDA_VISIBLE_DEVICES={value!r} names {len(devices)} GPUs, the job asked for {wanted}", "check --gres")
    return devices


@dataclass(frozen=True)
class Gpu:
    """One row of nvidia-smi. Memory in MiB; ``utilization`` in percent, None where the driver does not tell."""

    index: int
    used: int
    total: int
    utilization: int | None


def read_rows(text: str) -> tuple[Gpu, ...]:
    """``nvidia-smi --query-gpu=index,memory.used,memory.total,utilization.gpu --format=csv,noheader``, with or without
    units. Raises GpuError."""
    rows: list[Gpu] = []
    for line in filter(str.strip, text.splitlines()):
        cells = [re.sub(r"\s*(MiB|%)$", "", cell.strip()) for cell in line.split(",")]
        if len(cells) != 4 or not all(cell.isdecimal() for cell in cells[:3]):
            raise GpuError(f"nvidia-smi printed '{line.strip()[:80]}'", "this node's driver does not work: exclude the node")
        rows.append(Gpu(int(cells[0]), int(cells[1]), int(cells[2]), int(cells[3]) if cells[3].isdecimal() else None))
    if not rows:
        raise GpuError("nvidia-smi lists no GPU", "this node's driver does not work: exclude the node")
    return tuple(rows)


def busy(rows: Sequence[Gpu], own: Collection[int] | None = None, limit_mib: int = BUSY_MIB) -> tuple[Gpu, ...]:
    """Those of the job's ``own`` GPUs (None: all rows) whose memory another process holds."""
    return tuple(row for row in rows if (own is None or row.index in own) and row.used > limit_mib)


def idle_alarm(peaks_mib: Sequence[int], limit_mib: int = BUSY_MIB) -> str:
    """After the first step: what is wrong if GPUs stayed empty (all ranks on one GPU, say); "" if all were used."""
    idle = sum(peak <= limit_mib for peak in peaks_mib)
    return f"{idle} of {len(peaks_mib)} GPUs idle (peak MiB: {', '.join(map(str, peaks_mib))})" if idle else ""


def query() -> tuple[Gpu, ...]:
    """The GPUs that this node shows. Raises GpuError where the driver does not answer: never "no GPU is busy"."""
    return read_rows(_smi("--query-gpu=index,memory.used,memory.total,utilization.gpu"))


def settle(wanted: int, value: str | None, wait_s: float = WAIT_S) -> None:
    """Before the payload starts: the job's GPUs are those it asked for, and free within ``wait_s`` seconds.

    ``value`` is CUDA_VISIBLE_DEVICES. Without nvidia-smi only the first is checked. Raises GpuError.
    """
    devices = visible(value, wanted)
    end = time.monotonic() + wait_s
    while devices and shutil.which("nvidia-smi"):
        try:
            return check_free(devices)
        except GpuBusy:
            if time.monotonic() > end:
                raise
        time.sleep(min(POLL_S, wait_s))


def unused(wanted: int, value: str | None) -> str:
    """After the first step: ``idle_alarm`` for the job's GPUs as they are now; "" where nothing is wrong or can be seen."""
    if not wanted or not shutil.which("nvidia-smi"):
        return ""
    try:
        own = _indices(visible(value, wanted))
        return idle_alarm([gpu.used for gpu in query() if gpu.index in own])
    except GpuError as error:
        return error.what


def check_free(devices: Sequence[str], limit_mib: int = BUSY_MIB) -> None:
    """Raises GpuBusy where one of the job's ``devices`` (see ``visible``) is held by another process; names its pid."""
    if taken := busy(query(), _indices(devices), limit_mib):
        what = ", ".join(f"GPU {gpu.index} ({gpu.used} of {gpu.total} MiB)" for gpu in taken)
        raise GpuBusy(f"occupied before the start: {what}; {_holders(taken)}", "wait until they end, or exclude this node")


def _indices(devices: Sequence[str]) -> set[int]:
    """nvidia-smi's numbers of ``devices``, which may be named by index or by id."""
    uuids = {} if all(map(str.isdecimal, devices)) else _uuids()
    return {int(device) if device.isdecimal() else uuids.get(device, -1) for device in devices}


def _uuids() -> dict[str, int]:
    return {uuid: int(index) for index, uuid in _cells("--query-gpu=index,uuid", 2)}


def _holders(taken: Sequence[Gpu]) -> str:
    indices, uuids = {gpu.index for gpu in taken}, _uuids()
    rows = _cells("--query-compute-apps=gpu_uuid,pid", 2)
    pids = dict.fromkeys(pid for uuid, pid in rows if uuids.get(uuid) in indices)
    return "held by " + (", ".join(f"pid {pid} of {owner(pid)}" for pid in pids) or "processes this user cannot see")


def owner(pid: str) -> str:
    """The user who runs process ``pid``; "unknown" where /proc does not show it."""
    try:
        uid = os.stat(Path("/proc") / pid).st_uid
    except OSError:
        return "unknown"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _cells(query_option: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in _smi(query_option).splitlines()]
    return [row for row in rows if len(row) == width]


def _smi(query_option: str) -> str:
    try:
        return command.run("nvidia-smi", query_option, "--format=csv,noheader,nounits", deadline_s=SMI_DEADLINE_S).stdout
    except CommandError as error:
        raise GpuError(f"this node's GPUs do not answer ({error.what})", "exclude this node and report it") from None
