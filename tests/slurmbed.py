"""A real Slurm on this machine: munged, slurmctld and three slurmd, as root or as a plain user, up in about a second.

    python tests/slurmbed.py [--grace N] [--user-signal] [COMMAND ...]   # a cluster for COMMAND (or a shell), gone afterwards

Tests say ``with SlurmBed() as bed: bed.run("sbatch", ...)``. All state is in one folder. Every daemon is killed when the
owner dies, even by SIGKILL, and a keeper process (it sees its standard input close) then removes the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

NODES = ("a800-1", "a800-2", "a800-3")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "unshare", "setpriv")
FREEZER = Path("/sys/fs/cgroup/freezer")
SLURM_NAMES = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SACCT", "SCANCEL", "SUBMITIT")
CONFIG = Path(__file__).with_suffix(".conf")
# Dying processes keep the freezer busy for a moment, and may still write into the folder: try until both are gone.
KEEPER = """\
read -r _
for _ in $(seq 100); do
    [ -z "$2" ] || find "$2" -depth -type d -exec rmdir {} +
    rm -rf "$1"
    [ -e "$1" ] || [ -e "${2:-$1}" ] || exit 0
    sleep 0.1
done
"""


class BedError(Exception):
    """The bed cannot come up, or did not reach a state in time. Carries the tail of the daemons' output."""


def missing() -> str:
    """Why no bed can run here; empty where it can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in NEEDED if not shutil.which(name, path=path)]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge"
    probe = subprocess.run([*_namespace(), "true"], capture_output=True, text=True)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


def clean_environment() -> dict[str, str]:
    """This environment without what an outer Slurm or a user's habits put there, and with the daemons in PATH."""
    env = {key: value for key, value in os.environ.items() if key.split("_")[0] not in SLURM_NAMES}
    return env | {"PATH": env.get("PATH", "") + ":/usr/sbin:/sbin"}


def wait_for(condition: Callable[[], object], what: str, limit_s: float = 60.0, every_s: float = 0.1) -> None:
    """Poll until ``condition()`` is true. Raises BedError naming ``what`` after ``limit_s``."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise BedError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(every_s)


class SlurmBed:
    """Three nodes with four GPUs each; partition ``a800`` (requeued after ``grace`` seconds) below ``urgent`` (preempts).

    ``user_signal`` turns on preempt_send_user_signal; ``slurmd_timeout`` is how long a node may be silent (s): 30 spares a
    busy machine false node failures, 10 makes a power cut quick; ``kill_wait`` is the time from TERM to KILL (s).
    ``message_timeout`` (s): 5 makes a controller that is down quick to see; a bed whose steps are ended needs Slurm's default
    of 10. That takes a step 5 s, and a word to it that is not answered in time is said again a minute later: to the next
    attempt's step of the same number, as a requeue takes seconds here. Start it from the main thread: daemons die with the
    thread that started them.
    """

    def __init__(
        self, grace: int = 5, user_signal: bool = False, slurmd_timeout: int = 30, kill_wait: int = 3, message_timeout: int = 5
    ) -> None:
        self.grace, self.user_signal, self.slurmd_timeout, self.kill_wait = grace, user_signal, slurmd_timeout, kill_wait
        self.message_timeout = message_timeout
        self.folder = Path()
        self.env: dict[str, str] = {}
        self.track = "linuxproc"
        self._freezer: Path | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmBed:
        try:
            self._up()
        except BedError:  # a port that was free may be taken a moment later: once more with other ports
            self._up()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # coming and going

    def _up(self) -> None:
        try:
            self._begin()
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bed-", dir="/tmp"))  # short: socket paths end at 108 bytes
        self._freezer = _private_freezer()
        self.track = "cgroup" if self._freezer else "linuxproc"
        keep = ["sh", "-c", f"exec > /dev/null 2>&1; {KEEPER}", "keeper", str(self.folder), str(self._freezer or "")]
        self._keeper = subprocess.Popen(keep, stdin=subprocess.PIPE, start_new_session=True)
        self.folder.chmod(0o755)  # munged refuses a socket below a private folder
        for name in ("etc", "run", "log", "state", "spool", "dev", "cgroup/freezer"):
            (self.folder / name).mkdir(parents=True)
        self.env = clean_environment() | {"SLURM_CONF": str(self.folder / "etc/slurm.conf")}
        self._configure()
        run = self.folder / "run"
        quiet = ("--pid-file=", "--seed-file=", "--log-file=")
        self._start("munged", "-F", f"--socket={run}/munge.sock", f"--key-file={run}/munge.key", *quiet, "--num-threads=2")
        wait_for(lambda: self._alive() and (run / "munge.sock").exists(), "munged", 20, 0.02)
        self.restore_all()
        wait_for(lambda: self._alive() and set(self.node_states().values()) == {"idle"}, "idle nodes", 20)

    def _configure(self) -> None:
        etc = self.folder / "etc"
        host = socket.gethostname().split(".")[0]
        ports = _free_ports(1 + len(NODES))
        line = "NodeName={} NodeHostname={} NodeAddr=127.0.0.1 Port={} CPUs=32 RealMemory=500000 Gres=gpu:a800:4 State=UNKNOWN"
        nodes = "\n".join(line.format(node, host, port) for node, port in zip(NODES, ports[1:], strict=True))
        signals = "SlurmctldParameters=preempt_send_user_signal" if self.user_signal else ""
        config = CONFIG.read_text().format(
            bed=self.folder, host=host, me=getpass.getuser(), port=ports[0], track=self.track, nodes=nodes,
            user_signal=signals, slurmd_timeout=self.slurmd_timeout, grace=self.grace, kill_wait=self.kill_wait,
            message_timeout=self.message_timeout,
        )  # fmt: skip
        (etc / "slurm.conf").write_text(config)
        (etc / "plugstack.conf").touch()  # keeps the machine's own out
        mount = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.folder}/cgroup\nCgroupAutomount=no\n"
        (etc / "cgroup.conf").write_text(mount if self._freezer else "")
        devices = (f"NodeName={node} Name=gpu Type=a800 File={self._devices(node)}\n" for node in NODES)
        (etc / "gres.conf").write_text("".join(devices))
        (self.folder / "run/munge.key").touch(0o600)
        (self.folder / "run/munge.key").write_bytes(os.urandom(128))

    def _devices(self, node: str) -> str:
        """Character devices stand for the GPUs: without them Slurm exports no CUDA_VISIBLE_DEVICES."""
        if os.getuid():
            return "/dev/tty[0-3]"
        for index in range(4):
            os.mknod(self.folder / f"dev/{node}-gpu{index}", 0o020666, os.makedev(1, 3))
        return f"{self.folder}/dev/{node}-gpu[0-3]"

    def _start(self, name: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        with open(self.folder / f"log/{name}.out", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *prefix, *(arguments if prefix else (name, *arguments))],
                env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def _alive(self) -> bool:
        for name, daemon in self._daemons.items():
            if daemon.poll() is not None:
                tail = (self.folder / f"log/{name}.out").read_text(errors="replace")[-1000:]
                raise BedError(f"{name} ended with {daemon.returncode}: {tail}")
        return True

    def stop(self) -> None:
        """End everything and remove the folder. Safe to call twice."""
        for name in [*NODES, "slurmctld", "munged"]:
            self._kill(name)
        if self._keeper:
            self._keeper.communicate()
            self._keeper = None

    def _kill(self, name: str) -> None:
        if daemon := self._daemons.pop(name, None):
            daemon.kill()
            daemon.wait()

    # what happens to clusters

    def start_controller(self) -> None:
        """No effect on a running one."""
        if "slurmctld" not in self._daemons:
            self._start("slurmctld", "-D", "-f", self.env["SLURM_CONF"])

    def stop_controller(self) -> None:
        """SIGTERM, so that it saves its state; jobs go on. ``start_controller`` brings it back with its queue."""
        if daemon := self._daemons.pop("slurmctld", None):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(30)

    def power_cut(self, node: str) -> None:
        """Kill everything on ``node`` at once. Slurm notices after SlurmdTimeout."""
        self._kill(node)

    def restore(self, node: str) -> None:
        """Bring ``node`` back after a power cut; no effect on a living one."""
        if node in self._daemons:
            return
        bind = f"mount --bind {self._freezer} {self.folder}/cgroup/freezer &&" if self._freezer else ""
        # Not exec: bash stays PID 1 of the node and reaps orphans, which slurmd does not.
        script = f"{bind} slurmd -D -N {node} -f {self.env['SLURM_CONF']}; exit $?"
        self._start(node, "bash", "-c", script, prefix=_namespace())

    def restore_all(self) -> None:
        self.start_controller()
        for node in NODES:
            self.restore(node)

    def set_down(self, node: str) -> None:
        """The node counts as failed at once: the quick form of a power cut. ``resume`` makes it usable again."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def resume(self, node: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    # asking and tidying

    def run(self, *command: str, check: bool = True, **env: str) -> str:
        """The standard output of ``command`` on this cluster, with ``env`` added to its environment."""
        done = subprocess.run(command, env=self.env | env, capture_output=True, text=True, timeout=60, cwd=self.folder)
        if check and done.returncode:
            raise BedError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, script: str, *options: str) -> int:
        """Submit bash ``script``; its output goes to ``log/JOB.out`` of the bed. Gives the job id."""
        given = ("--parsable", "--output", f"{self.folder}/log/%j.out", "--open-mode=append", *options)
        return int(self.run("sbatch", *given, f"--wrap={script}").strip())

    def output(self, job: int) -> str:
        path = self.folder / f"log/{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, job: int) -> dict[str, str]:
        """What scontrol says about a job; empty for an unknown one."""
        text = self.run("scontrol", "-o", "show", "job", str(job), check=False)
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def wait_job(self, job: int, *states: str, limit_s: float = 60.0) -> None:
        wait_for(lambda: self.job(job).get("JobState") in states, f"job {job} to be {' or '.join(states)}", limit_s)

    def node_states(self) -> Mapping[str, str]:
        text = self.run("sinfo", "-h", "-N", "-p", "a800", "-o", "%N %T", check=False)
        return dict(line.split() for line in text.splitlines())

    def cancel_all(self) -> None:
        user = getpass.getuser()
        self.run("scancel", "--signal=KILL", "--full", "-u", user, check=False)
        self.run("scancel", "-u", user, check=False)
        wait_for(lambda: not self.run("squeue", "-h"), "an empty queue", 60)

    def wait_idle(self) -> None:
        """Dead nodes restored, downed and drained ones resumed, all idle."""
        self.restore_all()
        for node, state in self.node_states().items():
            if state.startswith(("down", "drain")):
                self.resume(node)
        wait_for(lambda: set(self.node_states().values()) == {"idle"}, "idle nodes", 90)


def _namespace() -> list[str]:
    """A node's own process table: killing its first process takes the whole node, like a power cut."""
    mine = [] if os.getuid() == 0 else ["--user", "--map-current-user"]
    return ["unshare", *mine, "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]


def _private_freezer() -> Path | None:
    """A freezer folder for this bed alone (else beds kill each other's jobs); None where there is none to have."""
    if os.getuid() != 0 or not os.access(FREEZER, os.W_OK):
        return None
    with contextlib.suppress(OSError):
        return Path(tempfile.mkdtemp(prefix=f"bed-{os.getpid()}-", dir=FREEZER))
    return None


def _free_ports(count: int) -> list[int]:
    """Free ports below the usual ephemeral range, where no outgoing connection takes them in the meantime."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 400):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
    return found[:count]


def main() -> int:
    parser = argparse.ArgumentParser(description="A real Slurm with three nodes for one command (default: your shell)")
    parser.add_argument("--grace", type=int, default=5, help="GraceTime of partition a800 in seconds")
    parser.add_argument("--user-signal", action="store_true", help="preempt_send_user_signal")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if why := missing():
        parser.error(why)
    with SlurmBed(asked.grace, asked.user_signal) as bed:
        return subprocess.call(["env", *(asked.command or [os.environ.get("SHELL", "bash")])], env=bed.env)


if __name__ == "__main__":
    raise SystemExit(main())
