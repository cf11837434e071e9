"""Processes of a run: started so that none outlives its supervisor, found again by a mark in their environment.

Linux only (prctl, /proc). Nothing here ever touches a process of another user or of another run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

MARK = "SLURMLIGHT_MARK"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel for ``signum`` when the thread that forked this process ends (for a child, right after fork)."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum))


def spawn(argv: Sequence[str], *, env: Mapping[str, str], output: int, cwd: str) -> subprocess.Popen[bytes]:
    """Start ``argv`` as leader of its own session, killed when this process dies; stdout and stderr go to fd ``output``.

    Raises OSError where the program cannot be started. Call from the main thread only: the tie is to the forking thread.
    """
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent()
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)
        # A blocked or ignored signal survives exec: the program gets the default ones back, but for USR2. That one is the
        # job's early warning; where a site sends it to every process it must not kill the payload.
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    return subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=prepare,
    )


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which ``pid`` started; None where there is no such process. Tells recycled pids apart."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def state(pid: int) -> str:
    """One letter of /proc/PID/stat (R S D T Z ...); empty where there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def alive(pid: int, started: int) -> bool:
    """Whether the very process that had ``pid`` and start time ``started`` still runs."""
    return start_time(pid) == started and state(pid) not in ("Z", "X")


def marked(marks: Iterable[str]) -> list[int]:
    """Own processes whose environment carries one of ``marks``; never this process or one that it descends from."""
    wanted = {f"{MARK}={mark}".encode() for mark in marks}
    if not wanted:
        return []
    lineage = _lineage(os.getpid())
    return [pid for pid in _own_pids() if pid not in lineage and wanted & _environment(pid)]


def end(pids: Iterable[int], grace: float = 0.0) -> None:
    """TERM, then KILL after ``grace`` seconds, and wait until they are gone (at most 10 s more: D state cannot be ended)."""
    known = {pid: started for pid in pids if (started := start_time(pid)) is not None}
    if grace:
        _signal(known, signal.SIGTERM)
        _wait(known, grace)
    _signal(known, signal.SIGKILL)
    _wait(known, 10.0)


def children(pid: int) -> list[int]:
    """Own processes whose parent is ``pid``."""
    return [one for one in _own_pids() if (fields := _stat(one)) and int(fields[1]) == pid]


def group(leader: int) -> list[int]:
    """Own processes in the process group of ``leader``, itself included."""
    return [pid for pid in _own_pids() if (fields := _stat(pid)) and int(fields[2]) == leader]


def _signal(known: Mapping[int, int], signum: int) -> None:
    for pid, started in known.items():
        if alive(pid, started):
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue


def _wait(known: Mapping[int, int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(pid, started) for pid, started in known.items()) and time.monotonic() < deadline:
        time.sleep(0.02)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (the second, the name, may hold blanks and brackets)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _own_pids() -> list[int]:
    uid, pids = os.getuid(), []
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _lineage(pid: int) -> set[int]:
    found = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    return found
