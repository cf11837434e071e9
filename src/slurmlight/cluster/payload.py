"""The payload of one attempt: started in its own process group, watched, asked to stop, ended with all it started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from slurmlight.cluster import container, gpus, nodelist, ports, processes
from slurmlight.cluster.attempts import Attempt, Log
from slurmlight.cluster.raycluster import RayCluster
from slurmlight.cluster.watch import Watchdog
from slurmlight.errors import UserError
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder, StopRequest

DUMP_S = 3.0  # for the stacks of a hung payload
HANG_STOP_S = 10.0  # for a payload that was only held up to save after all


class Payload:
    """A running payload. Raises OSError where its program cannot be started."""

    def __init__(self, run: RunFolder, plan: JobPlan, attempt: Attempt, log: Log, env: Mapping[str, str]) -> None:
        self.run, self.plan, self.attempt, self.log = run, plan, attempt, log
        if plan.image:
            container.remove(plan, attempt.attempt - 1)  # its supervisor may have been killed
            if warning := container.record(plan):
                log.line(warning)
        output = log.open()
        env = _environment(env, run, attempt) | _temp(plan, attempt) | _caches(plan, attempt, env)
        try:
            self.ray = _ray(run, plan, attempt, env, output)
            env |= self.ray.variables() if self.ray else {}
            self.process = processes.spawn(_argv(plan, attempt.attempt, env), env=env, output=output, cwd=plan.project_folder)
        finally:
            os.close(output)
        log.phase("payload", f"pid {self.process.pid}")
        self.watchdog = Watchdog(attempt.attempt, plan.first_step_s, plan.step_s, time.monotonic())
        self._beat: tuple[int, int] = (0, 0)
        self._status = run.status()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + signal where a signal ended it."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def lost(self, patience_s: float = 0.0) -> str:
        """What of the job's other nodes is gone, or goes within ``patience_s``; empty where all are there, or where there is
        one node only."""
        return self.ray.lost(patience_s) if self.ray else ""

    def look(self) -> str:
        """What the watchdog says is wrong; empty while all is well."""
        if (stamp := _stamp(self.run.path / "status.json")) != self._beat:
            self._beat, self._status = stamp, self.run.status()
        before = self.watchdog.stepped
        found = self.watchdog.look(self._status, _stamp(self.run.metrics)[1] > self.attempt.metrics_offset, time.monotonic())
        if self.watchdog.stepped and not before:
            self.log.phase("first step", gpus.unused(self.plan.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))
        return found

    def ask_to_stop(self, reason: str) -> None:
        """Have it save and end at the next step boundary."""
        try:
            self.run.request_stop(StopRequest(reason, self.attempt.attempt))
        except OSError as error:
            self.log.line(f"stop.json cannot be written ({error.strerror}); sending SIGTERM instead")
            self.signal(signal.SIGTERM)

    def signal(self, signum: int) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signum)

    def end(self, grace: float) -> None:
        """End it and everything it started, wherever that went."""
        leader = self.process.pid
        processes.end(processes.group(leader), grace)
        if self.ray:
            self.ray.end()
        processes.end(processes.marked([self.attempt.mark]), grace)
        self.process.wait()
        remove_temp(self.plan, self.attempt)
        if self.ray:  # its step is often killed before it can clear up; on the other nodes that is its own affair
            job = ports.job_folder(self.attempt.job, ports.root(self.plan.scratch))
            shutil.rmtree(job / str(self.attempt.attempt), ignore_errors=True)
        if self.plan.image:
            container.remove(self.plan, self.attempt.attempt)

    def end_hung(self) -> None:
        """Stacks into the log, a last chance to save, then the end."""
        pids = processes.group(self.process.pid)
        states = " ".join(f"{pid}:{processes.state(pid)}" for pid in pids)
        self.log.phase("hang", f"process states {states}; stacks follow")
        self.ask_to_stop("hang")
        self.signal(signal.SIGUSR1)  # faulthandler of the payload
        if any(processes.state(pid) == "T" for pid in pids):
            os.killpg(self.process.pid, signal.SIGCONT)
        self._wait(DUMP_S + HANG_STOP_S)
        self.end(grace=0)

    def _wait(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return


def _temp_folder(plan: JobPlan, attempt: Attempt) -> Path:
    return Path(plan.scratch or tempfile.gettempdir()) / f"sl-{attempt.mark[:8]}"  # short: Ray's socket paths end at 107 bytes


def _temp(plan: JobPlan, attempt: Attempt) -> dict[str, str]:
    """A folder for temporary files that goes with the attempt: a payload that is killed cannot clear up after itself.

    Not in a container, nor for several nodes: it would be missing there.
    """
    if plan.image or plan.nodes > 1:
        return {}
    folder = _temp_folder(plan, attempt)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # the payload will say what of that matters
        return {}
    return {"TMPDIR": str(folder)}


def _caches(plan: JobPlan, attempt: Attempt, env: Mapping[str, str]) -> dict[str, str]:
    """Where kernels that a job with GPUs compiles go; what the environment names already stays."""
    if not plan.gpus:
        return {}
    try:
        made = ports.make_caches(attempt.job, ports.root(plan.scratch))
        return {name: folder for name, folder in made.items() if name not in env}
    except UserError:  # it compiles them again
        return {}


def remove_temp(plan: JobPlan, attempt: Attempt) -> None:
    """Remove what the payload of ``attempt`` left in the node's temporary folder. Raises nothing."""
    shutil.rmtree(_temp_folder(plan, attempt), ignore_errors=True)


def _ray(run: RunFolder, plan: JobPlan, attempt: Attempt, env: Mapping[str, str], output: int) -> RayCluster | None:
    """Ray on all nodes of a job that has several; on one, the trainer starts it by itself."""
    if plan.nodes < 2:
        return None
    nodes = nodelist.expand(env.get("SLURM_JOB_NODELIST", ""))
    if len(nodes) < plan.nodes:
        raise UserError(f"--nodes {plan.nodes} but the job has {len(nodes)}", "several nodes need a Slurm job of that size")
    return RayCluster(plan, attempt.attempt, nodes, run.attempt(attempt.attempt), env, output)


def _argv(plan: JobPlan, attempt: int, env: Mapping[str, str]) -> list[str]:
    if not plan.image:
        return list(plan.payload)
    return container.wrap(plan, plan.payload, attempt, environ=env)


def _environment(env: Mapping[str, str], run: RunFolder, attempt: Attempt) -> dict[str, str]:
    return dict(env) | {
        "SLURMLIGHT_RUN": str(run.path),
        "SLURMLIGHT_ATTEMPT": str(attempt.attempt),
        processes.MARK: attempt.mark,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _stamp(path: os.PathLike[str]) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)
