"""How the failure of a vLLM worker reaches those who wait: as an answer that raises, and as a note in the scratch folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

SCRATCH = "SLURMLIGHT_SEED_SCRATCH"  # names a short folder of this run on this machine
_NOTE = "vllm-worker-failed.txt"


class WorkerFailed(RuntimeError):
    """A vLLM worker raised, or is gone."""


class Failure:
    """An answer that raises WorkerFailed where it is unpickled, which is in vLLM's engine process."""

    def __init__(self, told: str) -> None:
        self.told = told

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _raise, (self.told,)


def _raise(told: str) -> None:
    raise WorkerFailed(told)


def note(told: str) -> None:
    """For the trainer, from any process of the run on its machine."""
    Path(os.environ[SCRATCH], _NOTE).write_text(told)


def noted(scratch: Path) -> str:
    """The last note, "" where there is none."""
    try:
        return (scratch / _NOTE).read_text()
    except FileNotFoundError:
        return ""
