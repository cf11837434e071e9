"""Hands metrics.jsonl to SwanLab from a process of its own: python -m slurmlight.tracking.relay RUN MODE

A process, because SwanLab takes over SIGINT, sys.excepthook and the terminal, retries for minutes without a network, and
none of that may touch the training. The relay only reads the run folder; it ends when its standard input says so or its
parent is gone. Each start sends the whole of metrics.jsonl, which the cloud takes by step and which makes the newest
offline folder complete in itself, so older ones are deleted.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from slurmlight.files import read_json, read_json_lines, write_atomic
from slurmlight.runfolder import RunFolder
from slurmlight.secrets import redact
from slurmlight.tracking.names import STEP, number
from slurmlight.tracking.swanlab_mode import Mode, run_id

_POLL_S = 2.0


class Relay:
    """The parent's end."""

    def __init__(self, folder: RunFolder, mode: Mode) -> None:
        self._folder = folder
        self._log = folder.path / "swanlab" / "relay.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        _notice(folder).unlink(missing_ok=True)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slurmlight.tracking.relay", str(folder.path), mode],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    @property
    def notice(self) -> str:
        """One line where the relay goes on in another way than asked, "" else."""
        path = _notice(self._folder)
        return redact(path.read_text(errors="replace")) if path.exists() else ""

    @property
    def trouble(self) -> str:
        """One line where the relay ended by itself, "" while all is well."""
        code = self._process.poll()
        if code in (None, 0):
            return ""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
        return redact(last.strip())

    def close(self, patience_s: float = 10.0) -> str:
        """Let it send what is left and end, at most ``patience_s`` seconds; what went wrong, or ""."""
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(b"end\n")  # a close alone is not seen where a forked child holds the pipe too
                self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"SwanLab did not take the last metrics within {patience_s:.0f} s"
        return self.trouble


def main(folder: RunFolder, mode: Mode) -> None:
    parent = os.getppid()
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the payload, whose end is ours
    run = _start(folder, mode)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # SwanLab has put its own handler there
    sent = 0
    while True:
        ended = _told_to_end(_POLL_S) or bool(stopped) or os.getppid() != parent
        rows = _rows(folder)
        for row in rows[sent:]:
            values = {name: value for name in row if name != STEP and (value := number(row, name)) is not None}
            if values:
                run.log(values, step=row[STEP])
        sent = len(rows)
        if ended:
            run.finish()
            return


def _start(folder: RunFolder, mode: Mode) -> Any:
    os.environ |= {  # names of SwanLab 0.10; older versions do not know them
        "SWANLAB_INTERACTIVE": "false",
        "SWANLAB_PROBE_GIT": "false",  # a remote's URL may hold a password
        "SWANLAB_PROBE_REQUIREMENTS": "false",
        "SWANLAB_TERMINAL_PROXY_TYPE": "none",
    }
    try:
        return _init(folder, mode)
    except Exception as error:
        if mode != "cloud":
            raise
        write_atomic(_notice(folder), f"SwanLab's cloud did not take the run ({_short(error)}); writing offline files instead")
        return _init(folder, "offline")


def _init(folder: RunFolder, mode: Mode) -> Any:
    import swanlab

    logs = folder.path / "swanlab"
    if mode != "cloud":
        for old in logs.glob("run-*"):
            shutil.rmtree(old, ignore_errors=True)
    config = _redacted(read_json(folder.config) or {})
    trainer = config.get("trainer", {})
    asked: dict[str, Any] = {  # spelled as 0.7.5 wants it; 0.10 still takes "cloud" for "online" and logdir for log_dir
        "project": trainer.get("project_name", "slurmlight"),
        "experiment_name": f"{trainer.get('experiment_name', 'run')}-{folder.name}",
        "mode": mode,
        "logdir": str(logs),
        "id": run_id(folder.path, os.environ),
        "config": config,
    }
    if mode == "cloud":
        asked["resume"] = "allow"
    elif swanlab.__version__.startswith("0.7."):
        del asked["id"]  # which the seed stack's version takes in the cloud only
    return swanlab.init(**asked)


def _notice(folder: RunFolder) -> Path:
    return folder.path / "swanlab" / "notice"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(folder.metrics) if isinstance(row.get(STEP), int)]


def _told_to_end(seconds: float) -> bool:
    """Wait so long for a word on standard input, or its end."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


if __name__ == "__main__":
    try:
        main(RunFolder(Path(sys.argv[1])), sys.argv[2])  # type: ignore[arg-type]
    except Exception as error:
        print(_short(error))
        sys.exit(1)
