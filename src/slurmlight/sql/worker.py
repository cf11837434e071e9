"""A process that works on hostile SQL and can be killed: the last resort for what no handler in SQLite can interrupt.

    with Worker() as worker:
        result = worker.execute(Path("concert.sqlite"), sql)      # Result; kind "timeout" where it had to be killed
        value = worker.call(function, *arguments, timeout_s=10)   # any importable function; raises Overdue or Died

The process is kept warm (a call costs about 0.1 ms more than in-process), is replaced after a kill, dies with its parent,
and has its own memory limits. One call at a time; one Worker for each thread. Run by ``python -m slurmlight.sql.worker FD``.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, Self

from slurmlight.sql.execute import DEFAULT, Limits, Result, execute

MEMORY_BYTES = 4 << 30  # address space of the process
START_S = 60.0
PR_SET_PDEATHSIG = 1


class Overdue(Exception):
    """The call was not done in time; its process was killed."""


class Died(Exception):
    """The process ended during the call (out of memory, a crash of SQLite)."""


class Worker:
    """A handle on one worker process; it starts with the first call. Not for several threads at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def execute(self, database: Path, sql: str, limits: Limits = DEFAULT) -> Result:
        """``slurmlight.sql.execute.execute`` with an end: 1.1 times the limit. Raises DatabaseMissing, DatabaseBroken."""
        start = monotonic()
        try:
            return self.call(execute, database, sql, limits, timeout_s=limits.timeout_s * 1.1 + 0.05)
        except Overdue:
            return Result(
                "timeout", message="no result within the time limit (killed)", error="killed", seconds=monotonic() - start
            )
        except Died:
            return Result("too_large", message="the query ended its process", error="memory", seconds=monotonic() - start)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """``function(*arguments)`` in the process; what it raises is raised here. Raises Overdue and Died too."""
        connection = self._connection or self._start()
        try:
            connection.send((function, arguments))
            if not connection.poll(timeout_s):
                self.close()
                raise Overdue(f"not done within {timeout_s:.3g} s")
            done, value = connection.recv()
        except (EOFError, OSError):
            self.close()
            raise Died("the worker process ended") from None
        except BaseException:
            self.close()  # an answer that comes later must not be taken for that of the next call
            raise
        if done:
            return value
        raise value

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "slurmlight.sql.worker", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}
            )
        self._connection = connection = Connection(ours.detach())
        try:
            ready = connection.poll(START_S) and connection.recv()
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.close()
            raise Died("the worker process did not start")
        return connection

    def close(self) -> None:
        """End the process now."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()


def serve(connection: Connection, parent: int) -> None:
    """Answer calls until the parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send(True)
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, error)
        connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
