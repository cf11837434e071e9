"""Submission through submitit: the documented working pattern (host Python as the batch process, no srun around it).

The callable that submitit pickles is a reference to this module and a run folder, nothing else: a requeued job runs the same
pickle again, so everything it needs to resume is on disk.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmlight.cluster import slurm
from slurmlight.cluster.command import DeadlineExceeded
from slurmlight.cluster.place import LAUNCHER
from slurmlight.cluster.profiles import module_lines
from slurmlight.errors import UserError
from slurmlight.files import write_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder
from slurmlight.slurmtime import minutes

SBATCH_DEADLINE_S = 60.0
YEAR_MIN = 525_600


class Job:
    """What runs on the batch host: the supervisor of one run. Importable, so the pickle holds a name and a folder."""

    def __init__(self, run_folder: str) -> None:
        self.run_folder = run_folder

    def __call__(self) -> None:
        from slurmlight.cluster.supervisor import supervise

        code = supervise(Path(self.run_folder))
        if code:
            sys.exit(code)


def job_name(plan: JobPlan) -> str:
    """The Slurm name of a run's job: unique to the run folder, so that a lost sbatch answer can be looked up."""
    import hashlib

    return f"{plan.name}-{hashlib.sha256(plan.run_folder.encode()).hexdigest()[:6]}"


def sbatch_parameters(plan: JobPlan) -> dict[str, Any]:
    """submitit's parameters of ``plan``. Every text is checked: a newline would add lines to the job script."""
    limit = minutes(plan.time)
    extra: dict[str, Any] = {"signal": f"B:USR2@{plan.signal_lead_s}", "open-mode": "append"}
    extra |= {"requeue": True} if plan.requeue else {"no-requeue": True}
    if limit is None:
        extra["time"] = plan.time
    if plan.dependency:
        extra["kill-on-invalid-dep"] = "yes"  # else it stays in the queue for ever where the other job failed
    wanted: dict[str, Any] = {
        "job_name": job_name(plan),
        "partition": plan.partition,
        "time": math.ceil(limit) if limit is not None else YEAR_MIN,
        "nodes": plan.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": plan.cpus,
        "gres": plan.gres,
        "mem": plan.mem,
        "account": plan.account,
        "qos": plan.qos,
        "constraint": plan.constraint,
        "exclude": plan.exclude,
        "dependency": plan.dependency,
    }
    given = {key: value for key, value in wanted.items() if value not in ("", None)}
    for key, value in given.items():
        if isinstance(value, str) and not re.fullmatch(r"[^\s\x00-\x1f]+", value):
            raise UserError(f"{key}={value!r} holds blanks or control characters", "give a plain Slurm value")
    # Before submitit's own handlers are in, USR2 and TERM would kill the job: ignored until then. A pickle torn by a kill
    # (*.save_tmp) would fail every later attempt.
    setup = [
        "trap '' USR2 TERM",
        *module_lines(plan.modules),
        "export PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1",
        f"rm -f {shlex.quote(str(submitit_folder(plan)))}/*.save_tmp",
    ]
    return given | {"use_srun": False, "stderr_to_stdout": True, "setup": setup, "additional_parameters": extra}


def submitit_folder(plan: JobPlan) -> Path:
    return Path(plan.run_folder) / "submitit"


def script(plan: JobPlan) -> str:
    """The exact job script that ``submit`` would hand to sbatch. Needs no Slurm."""
    from submitit.slurm.slurm import _make_sbatch_string

    line = f"{_python()} -u -m submitit.core._submit {shlex.quote(str(submitit_folder(plan)))}"
    return _make_sbatch_string(command=line, folder=submitit_folder(plan), **sbatch_parameters(plan))


def _python() -> str:
    # exec: Python itself becomes the batch process, so that B:USR2 hits it and nothing stands between it and Slurm
    return f"exec {shlex.quote(sys.executable)}"


def submit(plan: JobPlan, *, follow: bool = False) -> str:
    """Submit ``plan`` and return the job id; job.json in the run folder holds it afterwards.

    Raises UserError with Slurm's own words where Slurm refuses.
    """
    job_id = _submit_slurm(plan) if plan.cluster == "slurm" else _submit_local(plan, follow)
    record = {"cluster": plan.cluster, "job_id": job_id, "name": job_name(plan), "submitted": time.time()}
    write_json(RunFolder(plan.run_folder).job, record)
    return job_id


def _submit_slurm(plan: JobPlan) -> str:
    import submitit
    from submitit.slurm.slurm import SlurmJob

    class Executor(submitit.SlurmExecutor):
        """submitit's executor, with a deadline for sbatch and a look-up before a second submission."""

        def _submit_command(self, command: str) -> SlurmJob[Any]:
            path = self.folder / "job.sh"
            path.write_text(self._make_submission_file_text(command, ""))
            return SlurmJob(folder=self.folder, job_id=_sbatch(path, job_name(plan)), tasks=[0])

    executor = Executor(submitit_folder(plan), max_num_timeout=1000, python=_python())
    executor.update_parameters(**sbatch_parameters(plan))
    return executor.submit(Job(plan.run_folder)).job_id


def _sbatch(path: Path, name: str) -> str:
    """Run sbatch once; where its answer is lost, look the job up by name before trying a second and last time."""
    since = time.time()
    for _ in range(2):
        try:
            return slurm.sbatch(path, deadline_s=SBATCH_DEADLINE_S)
        except DeadlineExceeded:
            if found := slurm.find_by_name(name, since):
                return found
    raise UserError(f"sbatch gave no answer in {SBATCH_DEADLINE_S:.0f} s, twice", "see whether slurmctld is up: scontrol ping")


def _submit_local(plan: JobPlan, follow: bool) -> str:
    import submitit

    executor = submitit.LocalExecutor(submitit_folder(plan), max_num_timeout=1000)
    executor.update_parameters(timeout_min=YEAR_MIN, stderr_to_stdout=True)
    # Ctrl-C reaches all of a terminal's processes. submitit's controller would print a traceback and kill the supervisor a
    # second later; ignored signals are inherited, and the supervisor takes its own back.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _environment(**({LAUNCHER: str(os.getpid())} if follow else {})):
            return executor.submit(Job(plan.run_folder)).job_id
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
