"""Run a command that dies with its parent, even by kill -9:  python -m slurmlight.train.rollouts.leash PARENT CMD ...

Standard library only: it starts in milliseconds and replaces itself by the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives execve


def hold() -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    hold()
    if os.getppid() != parent:  # it ended before the request was made
        raise SystemExit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
