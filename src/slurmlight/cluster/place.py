"""Where a job runs: under Slurm or on this machine. What the supervisor must know of it, and how a job comes back there."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from slurmlight.cluster import command, processes, slurm
from slurmlight.cluster.decide import TIME_LIMIT
from slurmlight.cluster.nodelist import expand
from slurmlight.cluster.processes import die_with_parent, start_time
from slurmlight.errors import UserError
from slurmlight.plan import JobPlan

LAUNCHER = "SLURMLIGHT_LAUNCHER"  # pid of the launcher that a foreground local run must not outlive
PREEMPTION = "preemption"
REQUEUE_PATIENCE_S = 900.0  # for a controller that is down; the node is paid for meanwhile


@dataclass(frozen=True)
class Warning:
    """Word that the job must stop: why, and for how many seconds the payload may still save (None: until killed)."""

    reason: str
    seconds: float | None
    coming_back: bool = False  # Slurm has requeued the job already


class Place(Protocol):
    job: str
    node: str
    nodes: tuple[str, ...]  # all of the job's
    restarts: int
    local: bool

    def on_signal(self, signum: int) -> Warning: ...
    def look(self) -> Warning | None: ...
    def requeue(self, say: Callable[[str], None]) -> bool: ...
    def avoid_node(self, say: Callable[[str], None]) -> None: ...
    def close(self) -> None: ...


class Local:
    """This machine. A job comes back as the supervisor's next attempt; it ends with its launcher where it has one."""

    local = True
    restarts = 0

    def __init__(self, job: str, env: Mapping[str, str]) -> None:
        self.node = socket.gethostname()
        self.nodes = (self.node,)
        self.job = job
        launcher = env.get(LAUNCHER, "")
        self._launcher = (int(launcher), start_time(int(launcher))) if launcher.isdigit() else None

    def on_signal(self, signum: int) -> Warning:
        return Warning("interrupt", None)

    def look(self) -> Warning | None:
        if self._launcher and start_time(self._launcher[0]) != self._launcher[1]:
            return Warning("launcher gone", None)
        return None

    def requeue(self, say: Callable[[str], None]) -> bool:
        return True

    def avoid_node(self, say: Callable[[str], None]) -> None:
        return

    def close(self) -> None:
        return


# A step beside the batch process, told by Slurm what that one is told late or never (measured on Slurm 22.05):
# - With a grace time TERM goes to steps at its start, to the batch process only at its end. The canary ends; see Slurm.look.
# - A batch process killed by a signal leaves a FAILED job that Slurm does not requeue, but its steps get TERM and KillWait:
#   time for the canary to requeue it, and to ask again where the controller does not answer. $1 is the cap, for a batch
#   process that is killed again and again. The step must outlive its srun for that: see Slurm._cut_loose.
_CANARY = """
leave() {
    trap "" TERM
    kill "$child"
    [ "${SLURM_RESTART_COUNT:-0}" -lt "$1" ] || exit 0
    while :; do
        if job=$(scontrol -o show job "$SLURM_JOB_ID"); then
            case "$job" in *" Reason=JobLaunchFailure "*) ;; *) exit 0 ;; esac
            scontrol requeue "$SLURM_JOB_ID" && exit 0
        fi
        sleep 1
    done
}
trap 'leave "$1"' TERM
sleep infinity & child=$!
wait "$child"
"""


class Slurm:
    """A batch job with a canary beside it."""

    local = False

    def __init__(self, job: str, env: Mapping[str, str], plan: JobPlan) -> None:
        self.job = job
        self.node = env.get("SLURMD_NODENAME") or socket.gethostname()
        self.restarts = int(env.get("SLURM_RESTART_COUNT") or 0)  # unset on the first run
        self._lead_s = plan.signal_lead_s
        self.nodes = tuple(expand(env.get("SLURM_JOB_NODELIST", self.node)))
        self._cap = plan.requeue_cap if plan.requeue else 0
        self._env = env
        self._canaries = 3
        self._watched = False
        self._canary = self._release_canary()

    def on_signal(self, signum: int) -> Warning:
        return _warning(_show(self.job), signum == signal.SIGUSR2, self.restarts, self._lead_s, time.time())

    def look(self) -> Warning | None:
        if self._canary is None:
            return None
        if self._canary.poll() is None:
            self._cut_loose(self._canary.pid)
            return None
        self._canary = None
        shown = _show(self.job)
        if shown.get("PreemptTime", "None") == "None" and shown.get("JobState") == "RUNNING":
            self._canary = self._release_canary()  # it died of something else
            return None
        return _warning(shown, False, self.restarts, self._lead_s, time.time())

    def requeue(self, say: Callable[[str], None]) -> bool:
        """``scontrol requeue``; true where the job comes back. A controller that does not answer is asked again."""
        try:
            slurm.patiently(lambda: slurm.requeue(self.job), say, REQUEUE_PATIENCE_S)
        except UserError as error:
            say(f"no requeue: {error}")
            return False
        return True

    def avoid_node(self, say: Callable[[str], None]) -> None:
        """Have the requeued job start on another node than this one, where enough others are up."""
        before = _show(self.job).get("ExcNodeList", "(null)")
        excluded = self.node if before == "(null)" else f"{before},{self.node}"
        up = ("sinfo", "-h", "-N", "-p", self._env.get("SLURM_JOB_PARTITION", ""), "-t", "idle,mixed,allocated", "-o", "%N")
        try:
            others = set(command.run(*up).stdout.split()) - set(expand(excluded))
            if len(others) < len(self.nodes):
                say(f"node {self.node} is not excluded: too few others are up")
                return
            command.run("scontrol", "update", f"JobId={self.job}", f"ExcNodeList={excluded}")
        except UserError as error:
            say(f"node {self.node} could not be excluded: {error.what}")
            return
        say(f"excluded from now on: {excluded}")

    def close(self) -> None:
        if self._canary and self._canary.poll() is None:
            self._canary.terminate()

    def _release_canary(self) -> subprocess.Popen[bytes] | None:
        if not self._canaries or not shutil.which("srun"):
            return None
        self._canaries -= 1
        self._watched = True

        def prepare() -> None:
            die_with_parent()  # by KILL: told anything else, srun would end the step at once
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        argv = ["srun", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", "--mem=0", "--job-name=canary"]
        argv += ["sh", "-c", _CANARY, "canary", str(self._cap)]
        quiet = subprocess.DEVNULL
        kept = {key: value for key, value in self._env.items() if key not in _STEP_SHAPE}
        return subprocess.Popen(
            argv, env=kept, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True, preexec_fn=prepare
        )

    def _cut_loose(self, srun: int) -> None:
        """End srun's watcher, a fork that has the step killed where srun is. Without it the step lives on until Slurm's TERM
        (batch process and supervisor killed: 40 of 40 jobs came back; where the kernel told srun by TERM, 1 of 4)."""
        if self._watched and (watchers := processes.children(srun)):
            processes.end(watchers)
            self._watched = False


# The batch script's shape, which srun would take as its own defaults and refuse for a one-task step.
_STEP_SHAPE = frozenset({"SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_MEM_PER_CPU",
                         "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_GPU", "SLURM_GPUS_PER_TASK"})  # fmt: skip


def job_here(cluster: str, env: Mapping[str, str]) -> str:
    """The id of the job this process is: Slurm's where the plan says so and Slurm started it, else one of its own."""
    if cluster == "slurm" and (job := env.get("SLURM_JOB_ID")):
        return job
    return f"local-{os.getpid()}-{start_time(os.getpid())}"


def here(job: str, plan: JobPlan, env: Mapping[str, str]) -> Place:
    return Local(job, env) if job.startswith("local-") else Slurm(job, env, plan)


def _show(job: str) -> dict[str, str]:
    """The words of ``scontrol -o show job``; empty where nobody answers (never a reason to fail)."""
    try:
        text = command.run("scontrol", "-o", "show", "job", job, deadline_s=5).stdout
    except command.CommandError:
        return {}
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def _warning(shown: Mapping[str, str], early: bool, restarts: int, lead_s: float, now: float) -> Warning:
    """What a signal means (measured on Slurm 22.05): its words do not differ, the job's record does.

    ``early``: it was USR2, Slurm's warning ahead; else TERM or the end of a step.
    """
    left = _seconds_to(shown.get("EndTime", ""), now)
    if int(shown.get("Restarts", "0")) > restarts:  # also PENDING by now, where the node was set DOWN
        return Warning("preemption or requeue", None, coming_back=True)
    if shown.get("JobState") == "COMPLETING":
        return Warning(TIME_LIMIT if shown.get("Reason") == "TimeLimit" else "cancel", None)
    if shown.get("PreemptTime", "None") != "None":
        return Warning(PREEMPTION, left)
    if left is not None and left <= lead_s + 90:  # Slurm looks at time limits every 30 s or so, and warns too early
        return Warning(TIME_LIMIT, left)
    return Warning("signal USR2" if early else "signal TERM", lead_s)


def _seconds_to(text: str, now: float) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() - now
    except ValueError:
        return None
