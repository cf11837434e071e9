"""The supervisor's guard: holds the run's lock, passes signals on, and starts another supervisor where one was killed.

Under Slurm the guard is the batch process. A supervisor that dies (kill -9, out of memory) would end the job as FAILED, which
Slurm never requeues; so it is a child, and its death costs one attempt.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slurmlight.cluster.processes import alive, die_with_parent, start_time
from slurmlight.errors import UserError
from slurmlight.files import read_json, write_json
from slurmlight.runfolder import RunFolder

SIGNALS = {signal.SIGUSR2, signal.SIGTERM, signal.SIGINT}
LOCK_WAIT_S = 60.0


@contextmanager
def own(folder: RunFolder, job: str) -> Iterator[None]:
    """Hold the run's lock. Raises UserError where another job holds it.

    The same job's earlier attempt may still be ending on another node: that one is waited for.
    """
    handle = os.open(folder.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _locked(handle):
            holder = owner(folder) or {}
            if holder.get("job") != job or time.monotonic() > deadline:
                who = f"job {holder.get('job', '?')} on {holder.get('node', '?')}, pid {holder.get('pid', '?')}"
                raise UserError(f"run {folder.name} is running already ({who})", f"slurmlight logs -f {folder.name} follows it")
            time.sleep(0.5)
        pid = os.getpid()
        write_json(_owner_path(folder), {"job": job, "node": socket.gethostname(), "pid": pid, "start": start_time(pid)})
        yield
    finally:
        os.close(handle)


def owner(folder: RunFolder) -> dict[str, Any] | None:
    """Who held the run's lock last: job, node, pid and start time of its guard."""
    value = read_json(_owner_path(folder))
    return value if isinstance(value, dict) else None


def living(folder: RunFolder) -> int | None:
    """The guard's pid where it runs on this machine; never a recycled pid."""
    holder = owner(folder) or {}
    pid, start = holder.get("pid"), holder.get("start")
    if holder.get("node") != socket.gethostname() or not isinstance(pid, int) or not isinstance(start, int):
        return None
    return pid if alive(pid, start) else None


def guard(work: Callable[[], int], give_up: Callable[[str], bool]) -> int:
    """Run ``work`` in a child process and return its exit code; start it again where a signal killed it.

    ``give_up`` is told how it died and says whether that was one time too many. Signals go to the child. Main thread only.
    """
    with blocked(SIGNALS | {signal.SIGCHLD}):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal; what has to end with its launcher watches that
        while True:
            code, told = _attend(_fork(work))
            if code >= 0:
                return code
            if told & {signal.SIGTERM, signal.SIGINT} or give_up(f"supervisor killed by {signal.Signals(-code).name}"):
                return 1


@contextmanager
def blocked(signals: set[signal.Signals]) -> Iterator[None]:
    """Signals wait to be fetched by sigtimedwait instead of running handlers (submitit's among them)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    handlers = {signum: signal.signal(signum, signal.SIG_DFL) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: better to run than not
        return True
    return True


def _owner_path(folder: RunFolder) -> Any:
    return folder.path / "owner.json"


def _fork(work: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent(signal.SIGTERM)  # without its guard a supervisor saves and ends
        os.setsid()  # Ctrl-C of the terminal reaches the guard alone, which passes it on once
        if os.getppid() == parent:
            code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _attend(child: int) -> tuple[int, set[int]]:
    """Wait for ``child``: its exit code (negative: the signal that killed it) and the signals it was passed."""
    told: set[int] = set()
    while True:
        event = signal.sigwaitinfo(SIGNALS | {signal.SIGCHLD})
        if event.si_signo != signal.SIGCHLD:
            told.add(event.si_signo)
            os.kill(child, event.si_signo)
            continue
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), told
