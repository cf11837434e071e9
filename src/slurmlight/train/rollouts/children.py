"""Child processes of the trainer: on a leash, in their own session (Ctrl-C is the trainer's to handle), with a log each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_LEASH = "slurmlight.train.rollouts.leash"
_TAIL = 2000  # bytes of a log searched for its last words


class ChildEnded(RuntimeError):
    """A process the attempt cannot do without is gone. The text says which, how, its last words and what to do."""


class Child:
    """One process. Start it from the main thread: the kernel ties a leash to the thread that started the process."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        """``env`` is added to this process's environment; secrets belong there, never into ``command``."""
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as errors:
            self._log_start = errors.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", _LEASH, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # access lines of servers; what matters goes to stderr
                stderr=errors,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ends_within(self, patience_s: float) -> bool:
        """Whether it is gone, or goes in the next moments: a connection breaks before the kernel has buried the process."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ending(self) -> str:
        """How it ended, in words, with the last line of its log."""
        code = self.process.poll()
        if code is None:
            return f"{self.name} is alive"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}{self._last_words()}"

    def stop(self, patience_s: float = 3.0) -> None:
        """End it: politely, then by force. Returns when it is gone."""
        if not self.alive:
            return
        self.process.terminate()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _last_words(self) -> str:
        try:
            text = self.log.read_bytes()[self._log_start :][-_TAIL:].decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("INFO:")]
        return f"; its last words: {lines[-1][:300]}" if lines else ""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on just now. Whoever binds it must be ready to lose the race."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
