"""Slurm's commands as functions: where a job is, submit, requeue, release, cancel, what a partition offers.

The order of evidence for a job's state is the queue (scontrol, then squeue), then accounting where the site has it, then the
run folder's finish mark. Every call has a deadline (command.DEADLINE_S); nothing here needs slurmdbd.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from slurmlight.cluster import command, records, verdicts
from slurmlight.cluster.command import CommandError, CommandFailed, CommandGarbled, CommandMissing, Result
from slurmlight.cluster.jobid import JobId, parse
from slurmlight.cluster.records import JobRecord
from slurmlight.cluster.refusals import refusal
from slurmlight.cluster.states import State, classify, plain_reason
from slurmlight.cluster.verdicts import Verdict
from slurmlight.errors import UserError

PATIENCE_S = 120.0
CLOCKS_S = 60.0
"""The controller's clock may be behind this machine's by so much."""
ACCOUNTING_OFF = "no accounting on this cluster: the state comes from the queue and the run folder alone"

_UNKNOWN_JOB = re.compile(r"invalid job id|^job \S+ not found", re.IGNORECASE | re.MULTILINE)
_DOWN = re.compile(
    r"unable to contact slurm controller|connection refused|connect failure|socket timed out|zero bytes were transmitted"
    r"|slurm backup controller in standby|temporarily unable to accept",
    re.IGNORECASE,
)


class SlurmDown(CommandError):
    """The controller does not answer. Jobs that run go on; ask again later (see ``patiently``)."""


def call(*argv: str, cluster: str = "", deadline_s: float = command.DEADLINE_S) -> Result:
    """Run one of Slurm's commands and return its result whatever its exit code.

    Raises SlurmDown, CommandMissing and DeadlineExceeded.
    """
    where = ("-M", cluster) if cluster else ()
    result = command.run(argv[0], *where, *argv[1:], check=False, deadline_s=deadline_s)
    if result.code != 0 and _DOWN.search(result.stderr):
        raise SlurmDown(f"{argv[0]}: {result.words}", "slurmctld is down or unreachable: try again later (scontrol ping)")
    return result


def patiently[T](action: Callable[[], T], tell: Callable[[str], None], limit_s: float | None = None) -> T:
    """``action()``, repeated while slurmctld does not answer; ``tell`` gets a line before each wait.

    Raises SlurmDown after ``limit_s`` seconds (default: PATIENCE_S).
    """
    limit_s = PATIENCE_S if limit_s is None else limit_s
    end, wait = time.monotonic() + limit_s, 2.0
    while True:
        try:
            return action()
        except SlurmDown as error:
            left = end - time.monotonic()
            if left <= 0:
                raise SlurmDown(f"{error.what}, for {limit_s:.0f} s", error.mend) from None
            tell(f"{error.what}; next try in {min(wait, left):.0f} s, giving up in {left:.0f} s")
            time.sleep(min(wait, left))
            wait = min(wait * 2, 20.0)


# where a job is


def job_state(job: str | int, *, finished: bool = False) -> Verdict:
    """The state of ``job`` (any spelling of its id); ``finished`` tells whether the run folder has the finish mark.

    Never raises for what Slurm says or does not say: an answer that cannot be had or read is UNKNOWN, with the reason in
    ``notes``. Raises JobIdError for a text that is no job id.
    """
    one, notes = parse(job), []
    try:
        if found := _in_queue(one):
            return _verdict(one, [verdicts.from_queue(record) for record in found])
    except CommandError as error:
        return Verdict(str(one), State.UNKNOWN, False, "nothing", says=f"unknown: {error.what}", notes=(str(error),))
    try:
        if found := _in_accounting(one):
            return _verdict(one, [verdicts.from_accounting(record, time.time()) for record in found])
    except CommandError as error:
        notes.append(error.what)
    seen = verdicts.without_record(str(one), finished)
    return replace(seen, notes=tuple(notes))


def find_by_name(name: str, since: float = 0.0) -> str | None:
    """The id of your newest job called ``name`` that Slurm took at ``since`` (seconds since the epoch) or later: the look-up
    after an sbatch whose answer was lost. An earlier job of the run has the same name.

    A FAILED (BadConstraints) row is what a refused sbatch leaves behind, not a job. Raises CommandError.
    """
    result = call("squeue", "-h", "--me", "-t", "all", "-n", name, "-o", records.SQUEUE_FORMAT)
    if result.code != 0:
        raise CommandFailed(result)
    taken = [
        record.id.job
        for record in records.from_squeue(result.stdout)
        if record.name == name and not is_leftover(record) and (record.submit_time or 0.0) >= since - CLOCKS_S
    ]
    return str(max(taken)) if taken else None


def is_leftover(record: JobRecord) -> bool:
    """A row that a refused sbatch leaves in the queue: no job ever ran."""
    return classify(record.words) is State.FAILED and plain_reason(record.reason) == "badconstraints"


def _verdict(job: JobId, parts: Sequence[Verdict]) -> Verdict:
    return parts[0] if len(parts) == 1 else verdicts.of_parts(str(job), parts)


def _in_queue(job: JobId) -> list[JobRecord]:
    """The records of ``job`` and its parts; empty where the controller does not know it. Raises CommandError.

    scontrol tells most; where it is missing or cannot be read squeue is asked.
    """
    try:
        return _ask(job, records.from_scontrol, "scontrol", "-o", "show", "job", str(job))
    except (CommandMissing, CommandGarbled):
        pass
    try:
        return _ask(job, _from_json, "squeue", "--json")  # 22.05 prints all jobs whatever else is asked
    except (CommandFailed, CommandGarbled):
        return _ask(job, records.from_squeue, "squeue", "-h", "-t", "all", "-j", str(job), "-o", records.SQUEUE_FORMAT)


def _ask(job: JobId, read: Callable[[str], list[JobRecord]], *argv: str) -> list[JobRecord]:
    result = call(*argv, cluster=job.cluster)
    if result.code != 0:
        if _UNKNOWN_JOB.search(result.stdout + result.stderr):
            return []
        raise CommandFailed(result)
    return _parts(job, read(result.stdout))


def _from_json(text: str) -> list[JobRecord]:
    try:
        return records.from_squeue_json(json.loads(text))
    except ValueError:
        raise CommandGarbled("squeue --json printed something else", "") from None


def _in_accounting(job: JobId) -> list[JobRecord]:
    result = call("sacct", "-D", "-n", "-P", "-j", str(job), "-o", records.SACCT_FORMAT, cluster=job.cluster)
    if result.code != 0:
        if "accounting storage is disabled" in (result.stderr + result.stdout).lower():
            raise CommandError(ACCOUNTING_OFF)
        raise CommandFailed(result)
    return _parts(job, records.from_sacct(result.stdout))


def _parts(job: JobId, found: Sequence[JobRecord]) -> list[JobRecord]:
    """Those of ``found`` that are ``job`` or parts of it: other jobs' rows and steps decide nothing."""
    return [
        record
        for record in found
        if record.id.job == job.job
        and job.task in (None, record.id.task)
        and job.component in (None, record.id.component)
        and not record.id.step
    ]


# acting on jobs


def sbatch(script: Path, *, deadline_s: float = command.DEADLINE_S) -> str:
    """Submit ``script``; gives the job id, ``123`` or ``123;cluster``.

    Raises SubmitRefused with Slurm's words, CommandGarbled where there is no id, SlurmDown, and DeadlineExceeded: then the
    job may or may not have been taken, so ``find_by_name`` comes before a second try.
    """
    result = call("sbatch", "--parsable", str(script), deadline_s=deadline_s)
    if result.code != 0:
        wrong_partition = "partition" in result.stderr.lower()
        raise refusal(result.stderr, ", ".join(_partitions_or_none()) if wrong_partition else "")
    return records.sbatch_id(result.stdout).full


def requeue(job: str | int) -> None:
    """Ask Slurm to end ``job`` and start it again. A job that is pending already counts as requeued.

    From inside the job everything after this races with the TERM. Raises UserError where Slurm will not requeue it.
    """
    one = parse(job)
    result = call("scontrol", "requeue", str(one), cluster=one.cluster)
    if result.code < 0:  # the job's own TERM hit scontrol: a second call tells whether the first was heard
        result = call("scontrol", "requeue", str(one), cluster=one.cluster)
    if result.code == 0 or re.search(r"pending execution|already completing", result.stderr, re.IGNORECASE):
        return
    if "presently disabled" in result.stderr:
        raise UserError(f"job {one} was submitted with --no-requeue", "submit it again")
    raise CommandFailed(result)


def release(job: str | int) -> None:
    """Let a held job run. Raises CommandFailed."""
    _scontrol("release", parse(job))


def cancel(job: str | int) -> None:
    """End ``job`` for good; no effect on one that has ended or is unknown. Raises CommandFailed."""
    one = parse(job)
    result = call("scancel", str(one), cluster=one.cluster)
    if result.code != 0 and not re.search(r"invalid job id|already complet", result.stderr, re.IGNORECASE):
        raise CommandFailed(result)


def require_parent(job: str | int) -> str:
    """``job`` where Slurm knows it; an ``afterok`` on an unknown id would start at once (22.05). Raises UserError."""
    seen = job_state(job)
    if seen.state in (State.GONE, State.UNKNOWN):
        raise UserError(f"job {seen.job} is not known to Slurm ({seen.says})", "depend on a job that is in the queue")
    return seen.job


def _scontrol(verb: str, job: JobId) -> None:
    result = call("scontrol", verb, str(job), cluster=job.cluster)
    if result.code != 0:
        raise CommandFailed(result)


# what there is


def partitions() -> tuple[str, ...]:
    """Names of all partitions, the default first. Raises CommandError."""
    result = call("sinfo", "-h", "-o", "%P")
    if result.code != 0:
        raise CommandFailed(result)
    names = dict.fromkeys(result.stdout.split())
    return tuple(name.rstrip("*") for name in sorted(names, key=lambda name: not name.endswith("*")))


def partition_gres(partition: str) -> tuple[str, ...]:
    """The GRES lines of a partition's nodes, as ``sinfo %G`` prints them: see gres.offer. Raises CommandError, and
    SubmitRefused for a partition that does not exist."""
    result = call("sinfo", "-h", "-p", partition, "-o", "%G")
    if result.code != 0:
        raise CommandFailed(result)
    lines = tuple(line.strip() for line in result.stdout.splitlines() if line.strip())
    if not lines:  # sinfo says nothing, with exit code 0
        raise refusal(f"invalid partition specified: {partition}", ", ".join(_partitions_or_none()))
    return lines


def _partitions_or_none() -> tuple[str, ...]:
    try:
        return partitions()
    except CommandError:
        return ()


def answers() -> bool:
    """Whether there is a Slurm here that answers."""
    try:
        return bool(partitions())
    except CommandError:
        return False
