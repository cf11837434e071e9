"""What Slurm prints about jobs -> JobRecord: scontrol -o, squeue --json, squeue and sacct text. Pure parsers.

Text that does not have the promised form raises CommandGarbled: the caller then knows nothing, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from slurmlight.cluster.command import CommandGarbled
from slurmlight.cluster.jobid import JobId, JobIdError, parse, parse_all, tasks
from slurmlight.cluster.states import TABLE

SQUEUE_FORMAT = "%i|%T|%r|%N|%t|%E|%Q|%P|%V|%j"
"""squeue -o: id, state, reason, nodes, code, dependency, priority, partition, submit time, name (last: any character)."""
SACCT_FORMAT = "JobID,State,ExitCode,End,NodeList"


@dataclass(frozen=True)
class JobRecord:
    """One job as one command described it. None: that command does not tell. Times are seconds since the epoch."""

    id: JobId
    words: tuple[str, ...]
    reason: str = ""
    name: str = ""
    nodes: str = ""
    partition: str = ""
    restarts: int | None = None
    requeue: bool | None = None
    priority: int | None = None
    exit_code: str = ""  # code:signal
    dependency: str = ""
    stdout: str = ""
    submit_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None


def from_scontrol(text: str) -> list[JobRecord]:
    """``scontrol -o show job``: one line a job; lines of an array carry the id of their task, not their own."""
    return [record for line in text.splitlines() if line.strip() for record in _scontrol_line(line)]


def _scontrol_line(line: str) -> list[JobRecord]:
    # A job's name may hold blanks and "=": what follows UserId is Slurm's own, and there the first of a key counts.
    head, _, tail = line.partition(" UserId=")
    ids, _, name = head.partition(" JobName=")
    values = _pairs(ids) | {"JobName": name} | _pairs(f"UserId={tail}") if tail else _pairs(line)
    try:
        number, words = int(values["JobId"]), (values["JobState"],)
    except (KeyError, ValueError):
        raise CommandGarbled(f"scontrol printed no job: '{line[:80]}'", "") from None
    record = JobRecord(
        id=JobId(number),
        words=words,
        reason=_text(values, "Reason"),
        name=values.get("JobName", ""),
        nodes=_text(values, "NodeList"),
        partition=_text(values, "Partition"),
        restarts=_number(values.get("Restarts")),
        requeue={"0": False, "1": True}.get(values.get("Requeue", "")),
        priority=_number(values.get("Priority")),
        exit_code=_text(values, "ExitCode"),
        dependency=_text(values, "Dependency"),
        stdout=_text(values, "StdOut"),
        submit_time=_moment(values.get("SubmitTime")),
        start_time=_moment(values.get("StartTime")),
        end_time=_moment(values.get("EndTime")),
    )
    array, component = _number(values.get("ArrayJobId")), _number(values.get("HetJobId"))
    if array is not None and values.get("ArrayTaskId"):
        return [replace(record, id=JobId(array, task)) for task in _tasks(values["ArrayTaskId"])]
    if component is not None:
        return [replace(record, id=JobId(component, None, _number(values.get("HetJobOffset")) or 0))]
    return [record]


def _pairs(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for pair in text.split():
        key, separator, value = pair.partition("=")
        if separator:
            values.setdefault(key, value)
    return values


def from_squeue_json(document: Any) -> list[JobRecord]:
    """``squeue --json`` of 22.05 (plain values) and newer (state lists, numbers as {set, number})."""
    jobs = document.get("jobs") if isinstance(document, Mapping) else None
    if not isinstance(jobs, list):
        raise CommandGarbled("squeue --json printed no list of jobs", "")
    return [record for job in jobs for record in _json_job(job)]


def _json_job(job: Any) -> list[JobRecord]:
    if not isinstance(job, Mapping) or (number := _number(job.get("job_id"))) is None:
        raise CommandGarbled("squeue --json printed a job without an id", "")
    state = job.get("job_state")
    record = JobRecord(
        id=JobId(number),
        words=tuple(str(word) for word in state) if isinstance(state, list) else (str(state),),
        reason=_text(job, "state_reason"),
        name=_text(job, "name"),
        nodes=_text(job, "nodes"),
        partition=_text(job, "partition"),
        restarts=_number(job.get("restart_cnt")),
        requeue=job.get("requeue") if isinstance(job.get("requeue"), bool) else None,
        priority=_number(job.get("priority")),
        exit_code=_exit_code(job.get("exit_code")),
        dependency=_text(job, "dependency"),
        stdout=_text(job, "standard_output"),
        submit_time=_number(job.get("submit_time")) or None,
        start_time=_number(job.get("start_time")) or None,
        end_time=_number(job.get("end_time")) or None,
    )
    array, task, component = (_number(job.get(key)) for key in ("array_job_id", "array_task_id", "het_job_id"))
    if array and task is not None:
        return [replace(record, id=JobId(array, task))]
    if array and _text(job, "array_task_string"):
        return [replace(record, id=JobId(array, one)) for one in _tasks(_text(job, "array_task_string"))]
    if component:
        return [replace(record, id=JobId(component, None, _number(job.get("het_job_offset")) or 0))]
    return [record]


def _exit_code(value: Any) -> str:
    """22.05 prints the raw wait status, newer versions an object: both as ``code:signal``."""
    if isinstance(value, int):
        return f"{value >> 8}:{value & 127}"
    if isinstance(value, Mapping):
        signal = value.get("signal")
        number = _number(signal.get("id")) if isinstance(signal, Mapping) else 0
        return f"{_number(value.get('return_code')) or 0}:{number or 0}"
    return ""


def from_squeue(text: str) -> list[JobRecord]:
    """``squeue -h -o SQUEUE_FORMAT`` (its first five columns are enough)."""
    records: list[JobRecord] = []
    for line in filter(str.strip, text.splitlines()):
        columns = line.split("|", 9)
        if len(columns) < 5:
            raise CommandGarbled(f"squeue printed '{line[:80]}'", "")
        columns += [""] * (10 - len(columns))
        number, word, reason, nodes, _, dependency, priority, partition, submitted, name = columns
        record = JobRecord(
            id=JobId(0),
            words=(word,),
            reason=reason,
            name=name,
            nodes=nodes,
            partition=partition,
            priority=_number(priority),
            dependency=_null(dependency),
            submit_time=_moment(submitted),
        )
        records += [replace(record, id=one) for one in _ids(number)]
    return records


_DEFAULT_ROW = re.compile(
    r"^\s*(?P<id>\S+)\s+(?P<partition>\S+)\s+(?P<name>.*?)\s+(?P<word>[A-Z_]+\+?)\s+[\d:-]+\s+\d+\s+(?P<where>.*)$"
)


def from_squeue_row(line: str) -> list[JobRecord]:
    """A row of squeue without options, as people paste it: JOBID PARTITION NAME [USER] ST TIME NODES NODELIST(REASON)."""
    match = _DEFAULT_ROW.match(line)
    if not match or match["word"] not in TABLE:
        raise CommandGarbled(f"'{line[:80]}' is not a row of squeue", "")
    where = match["where"].strip()
    reason, nodes = (where.strip("()"), "") if where.startswith("(") else ("", where)
    return [
        JobRecord(one, (match["word"],), reason, match["name"].split()[0] if match["name"] else "", nodes, match["partition"])
        for one in _ids(match["id"])
    ]


def from_sacct(text: str) -> list[JobRecord]:
    """``sacct -D -n -P -o SACCT_FORMAT`` (its first two columns are enough). Steps are left out; the last attempt of an
    id wins."""
    last: dict[JobId, JobRecord] = {}
    for line in filter(str.strip, text.splitlines()):
        columns = line.split("|")
        if len(columns) < 2:
            raise CommandGarbled(f"sacct printed '{line[:80]}'", "")
        number, word, code, end, nodes = (columns + [""] * 3)[:5]
        for one in _ids(number):
            if not one.step:
                last.pop(one, None)
                last[one] = JobRecord(one, (word,), nodes=nodes, exit_code=code, end_time=_moment(end))
    return list(last.values())


def sbatch_id(stdout: str) -> JobId:
    """The id in what ``sbatch --parsable`` or plain ``sbatch`` printed. Raises CommandGarbled: "no job id"."""
    for line in reversed(stdout.splitlines()):
        word = re.sub(r"^Submitted batch job (\d+)(?: on cluster (\S+))?$", r"\1;\2", line.strip())
        if re.match(r"^\d+(;\S*)?$", word):
            return parse(word)
    raise CommandGarbled(f"sbatch gave no job id (it printed {stdout.strip()[:60]!r})", "look for the job with squeue --me")


def _ids(text: str) -> tuple[JobId, ...]:
    try:
        return parse_all(text)
    except JobIdError as error:
        raise CommandGarbled(error.what, "") from None


def _tasks(text: str) -> tuple[int, ...]:
    try:
        return tasks(text)
    except JobIdError as error:
        raise CommandGarbled(error.what, "") from None


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return _null(value) if isinstance(value, str) else ""


def _null(text: str) -> str:
    return "" if text in ("(null)", "N/A", "None assigned") else text


def _number(value: Any) -> int | None:
    if isinstance(value, Mapping):  # {"set": true, "infinite": false, "number": 1}
        value = value.get("number") if value.get("set", True) else None
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _moment(text: str | None) -> float | None:
    """Slurm prints local time: ``2026-11-29T22:54:31``; ``Unknown``, ``None`` or ``N/A`` where there is none."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None
