"""Slurm's job ids in all spellings: ``17``, ``17_4``, ``5+1``, ``17.batch``, ``4_[2-3%2]``, ``123;cluster``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurmlight.errors import UserError

_FORM = re.compile(
    r"^(?P<job>\d{1,19})"
    r"(?:_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]+)\])|\+(?P<component>\d+))?"
    r"(?:\.(?P<step>[A-Za-z0-9_+]+))?"
    r"(?:;(?P<cluster>[A-Za-z0-9._-]*))?$"
)
_TASKS = re.compile(r"^(\d+)(?:-(\d+)(?::(\d+))?)?$")
_MOST_TASKS = 4_000_001  # Slurm's upper bound of MaxArraySize


class JobIdError(UserError):
    """The text is no job id."""


@dataclass(frozen=True, order=True)
class JobId:
    """A job; with ``task`` one of an array, with ``component`` one of a heterogeneous job, with ``step`` a part of one run."""

    job: int
    task: int | None = None
    component: int | None = None
    step: str = ""
    cluster: str = ""

    def __str__(self) -> str:
        """The spelling Slurm's commands take (the cluster goes into ``-M``)."""
        task = "" if self.task is None else f"_{self.task}"
        component = "" if self.component is None else f"+{self.component}"
        return f"{self.job}{task}{component}" + (f".{self.step}" if self.step else "")

    @property
    def full(self) -> str:
        """With the cluster, as sbatch --parsable prints it: what to write into a file."""
        return f"{self};{self.cluster}" if self.cluster else str(self)


def parse(text: str | int) -> JobId:
    """One id. Raises JobIdError; also for ``4_[2-3]``, which is several: see ``parse_all``."""
    ids = parse_all(text)
    if len(ids) != 1:
        raise JobIdError(f"'{text}' names {len(ids)} array tasks", "name one of them")
    return ids[0]


def parse_all(text: str | int) -> tuple[JobId, ...]:
    """The ids ``text`` stands for: several where it is a row of a pending array. A throttle (``%2``) is no task number."""
    match = _FORM.match(str(text).strip())
    if not match:
        raise JobIdError(f"'{text}' is not a Slurm job id", "expected a number such as 123456 or 123456_7")
    job, step, cluster = int(match["job"]), match["step"] or "", match["cluster"] or ""
    if match["tasks"]:
        return tuple(JobId(job, task, None, step, cluster) for task in tasks(match["tasks"]))
    task, component = (int(match[key]) if match[key] else None for key in ("task", "component"))
    return (JobId(job, task, component, step, cluster),)


def tasks(text: str) -> tuple[int, ...]:
    """Array task numbers of ``0-3``, ``1,3,5-9:2`` or ``2-3%2``, in order. Raises JobIdError."""
    found: list[int] = []
    for item in text.partition("%")[0].split(","):
        match = _TASKS.match(item)
        if not match or not int(match[1]) <= int(match[2] or match[1]) < _MOST_TASKS or match[3] == "0":
            raise JobIdError(f"'{text[:80]}' is not a list of array tasks", "expected for instance 0-3%2")
        found += range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
    return tuple(found)
