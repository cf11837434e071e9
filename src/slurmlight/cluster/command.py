"""The one way to run another program: an argument list, a deadline, captured output, a clean environment."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from slurmlight.errors import UserError

DEADLINE_S = 20.0
"""Slurm's commands answer in milliseconds; without slurm.conf they retry for 60 s, without a controller for longer."""

_SLURM_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")


@dataclass(frozen=True)
class Result:
    """What a program left behind. ``code`` is negative where a signal ended it; text that is not UTF-8 is replaced."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """The last line it said, on stderr before stdout: for messages."""
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}, no output"


class CommandError(UserError):
    """An outside program did not do its work."""


class CommandMissing(CommandError):
    """The program is not installed, not in PATH or not executable."""


class CommandFailed(CommandError):
    """The program ended with a code other than 0."""

    def __init__(self, result: Result, mend: str = "") -> None:
        self.result = result
        super().__init__(f"{result.argv[0]}: {result.words}", mend or f"the command was: {shlex.join(result.argv)}")


class DeadlineExceeded(CommandError):
    """The program did not end in time and was killed with its children. ``result`` holds what it had said."""

    def __init__(self, result: Result, deadline_s: float) -> None:
        self.result = result
        said = f" ({result.words})" if result.stderr or result.stdout else ""
        super().__init__(f"{result.argv[0]} did not answer within {deadline_s:g} s{said}", "check that cluster service")


class CommandGarbled(CommandError):
    """The program's output does not have the promised form."""


def run(
    *argv: str,
    deadline_s: float = DEADLINE_S,
    check: bool = True,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run ``argv`` (no shell) in ``env`` (default: ``clean_environment()``), at most ``deadline_s`` seconds.

    Raises CommandMissing, DeadlineExceeded, and CommandFailed for a code other than 0 unless ``check`` is False.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment() if env is None else env,
            start_new_session=True,  # its children die with it at the deadline, and cannot hold the pipes open
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        raise CommandMissing(f"command '{argv[0]}' not found", "run this where it is installed and in PATH") from None
    try:
        stdout, stderr = process.communicate(stdin.encode() if stdin is not None else None, timeout=deadline_s)
    except BaseException as error:
        stdout, stderr = _kill(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise DeadlineExceeded(_result(argv, process, stdout, stderr), deadline_s) from None
        raise
    result = _result(argv, process, stdout, stderr)
    if check and result.code != 0:
        raise CommandFailed(result)
    return result


def clean_environment() -> dict[str, str]:
    """This environment without the Slurm variables that change what its commands do or print; messages in English."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_SLURM_PREFIXES)}
    return kept | {"LC_ALL": "C"}


def _kill(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=5)
    except subprocess.TimeoutExpired as stuck:  # a grandchild that left the group still holds the pipes
        return stuck.output or b"", stuck.stderr or b""


def _result(argv: tuple[str, ...], process: subprocess.Popen[bytes], stdout: bytes, stderr: bytes) -> Result:
    code = -signal.SIGKILL if process.returncode is None else process.returncode
    return Result(argv, code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
