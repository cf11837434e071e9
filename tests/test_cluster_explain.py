"""slurmlight explain on files of any kind: a person's view and the one for scripts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slurmlight.cli import explain
from slurmlight.cluster import logfile
from slurmlight.errors import UserError

QUOTA = "OSError: [Errno 122] Disk quota exceeded: '/ckpt/latest_checkpointed_iteration.txt'"


def command(*arguments: object) -> tuple[int, str]:
    import typer

    app = typer.Typer()
    app.callback()(lambda: None)
    explain.register(app)
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    if isinstance(result.exception, UserError):
        return result.exception.exit_code, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_for_people(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(f"hello\n=== slurmlight attempt 3 ===\n{QUOTA}\n")
    code, text = command(log)
    assert code == 0
    assert "cause     quota" in text and f"line 3, attempt 3: {QUOTA}" in text and "free space" in text


def test_for_scripts(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(QUOTA)
    code, text = command("--json", log)
    assert code == 0
    found = json.loads(text)
    assert (found["cause"], found["evidence"], found["line"]) == ("quota", QUOTA, 1)
    assert "free space" in found["action"]


def test_healthy(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("Training Progress:   3%|▎         | 4/125 [06:12<3:02:11, 90.3s/it]")
    assert command(log)[0] == 0 and "nothing found" in command(log)[1]
    assert json.loads(command(log, "--json")[1])["cause"] is None


@pytest.mark.parametrize(
    "raw", [b"", bytes(range(256)) * 50, b"\xff\xfe" + "a\n".encode("utf-16-le"), b"\x00" * 5000, b"\x1b[" * 500]
)
def test_any_bytes(tmp_path: Path, raw: bytes) -> None:
    log = tmp_path / "log.bin"
    log.write_bytes(raw)
    assert command(log)[0] == 0
    log.write_bytes(raw + b"\n" + QUOTA.encode() + b"\n" + raw)
    assert json.loads(command(log, "--json")[1])["cause"] == "quota"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    code, text = command(tmp_path / "nowhere")
    assert code == 2 and "nowhere does not exist" in text
    code, text = command(tmp_path)
    assert code == 2 and "is a folder" in text
    code, _ = command(tmp_path / "a" / ("b" * 300))
    assert code == 2


def test_pipe(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, QUOTA.encode())
    os.close(write)
    assert json.loads(command("--json", f"/dev/fd/{read}")[1])["cause"] == "quota"
    os.close(read)


def ordinary(lines: int) -> str:
    return "".join(f"2026-11-29 18:05:04 INFO ordinary line {n}\n" for n in range(lines))


def test_huge_file(tmp_path: Path) -> None:
    """The first cause of the last attempt is found although most of the file is not read."""
    log = tmp_path / "log.txt"
    early = f"{ordinary(2000)}srun: error: Node failure on n1\n=== slurmlight attempt 2 ===\n"
    log.write_text(f"{early}{ordinary(10)}{QUOTA}\n{ordinary(3000)}OSError: [Errno 98] Address already in use\nlast\n")
    read = logfile.read(log, limit=20_000)
    assert read.gap > 0 and len(read.text) <= 20_001
    assert read.line_number(1) == 2002
    lines = log.read_text().splitlines()
    shown = read.text.splitlines()
    for number in (1, 5, len(shown) - 1, len(shown)):
        assert lines[read.line_number(number) - 1] == shown[number - 1]
    log.write_text(early + ordinary(5))
    assert logfile.read(log, limit=20_000).text.startswith("=== slurmlight attempt 2")
