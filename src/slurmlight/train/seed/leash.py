"""The leash of rollouts/leash.py for processes that multiprocessing started."""

from __future__ import annotations

import multiprocessing
import os

from slurmlight.train.rollouts.leash import hold


def leash() -> None:
    """End with the parent from now on, and at once where it ended before this call."""
    hold()
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
