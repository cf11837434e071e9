"""Whether the run folder has room, found out by taking it: quotas and network disks do not show in statvfs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from slurmlight.cluster.attempts import newest_checkpoint
from slurmlight.runfolder import RunFolder

CAUSES = frozenset({"disk full", "quota"})  # of failures.diagnose: here waiting may help
WAIT_S = 600.0  # that a job holds its node for somebody, or another job's end, to free space
POLL_S = 5.0
LEAST_BYTES = 1 << 20
MOST_BYTES = 1 << 30  # where a file system cannot reserve, the bytes are written


def lacking(run: RunFolder) -> str:
    """Why a checkpoint as large as the newest does not fit; empty where it does. Leaves nothing behind."""
    probe = run.path / f".space.{os.getpid()}"
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(handle, 0, max(LEAST_BYTES, min(MOST_BYTES, _newest_bytes(run))))
        finally:
            os.close(handle)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        probe.unlink(missing_ok=True)
    return ""


def wait(run: RunFolder, go_on: Callable[[float], bool], limit_s: float = WAIT_S) -> bool:
    """Wait until there is room; false after ``limit_s`` seconds, or when ``go_on``, given the seconds to sleep, says no."""
    deadline = time.monotonic() + limit_s
    while lacking(run):
        if time.monotonic() > deadline or not go_on(POLL_S):
            return False
    return True


def _newest_bytes(run: RunFolder) -> int:
    folder = run.path / f"global_step_{newest_checkpoint(run)}"
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:
        return 0
