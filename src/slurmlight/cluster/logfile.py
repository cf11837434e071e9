"""Reading a log that may be of any size and kind: all of it where it is small, else what matters of its last attempt."""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from slurmlight.cluster.logtext import MARKER
from slurmlight.errors import UserError

WHOLE = 32 * 2**20
"""Bytes that are read at most; a bigger attempt gives its first quarter (where causes are) and its end."""
SEARCHED = 2**30
"""How far from the end the last attempt's marker is looked for."""


@dataclass(frozen=True)
class LogFile:
    """``text`` of a log; ``before`` lines of the file stand before it, and after its ``head`` lines ``gap`` lines are left
    out (0: none)."""

    text: str
    before: int = 0
    head: int = 0
    gap: int = 0

    def line_number(self, line: int) -> int:
        """The number in the file of a line of ``text``, both from 1."""
        return line + self.before + (self.gap if line > self.head else 0)


def read(path: Path, limit: int = WHOLE) -> LogFile:
    """The text of ``path``; bytes that are not UTF-8 are replaced. Raises UserError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or size <= limit:
                return LogFile(_text(file.read(limit)))
            return _big(file.fileno(), size, limit)
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder", "give the log file in it, for instance attempts/latest/log.txt of a run"
        ) from None
    except FileNotFoundError:
        raise UserError(f"log file {path} does not exist", "check the path (slurmlight logs RUN shows a run's log)") from None
    except (OSError, ValueError) as error:
        raise UserError(f"log file {path} cannot be read ({getattr(error, 'strerror', None) or error})", "check it") from None


def _big(handle: int, size: int, limit: int) -> LogFile:
    with mmap.mmap(handle, 0, prot=mmap.PROT_READ) as data:
        start = max(data.rfind(MARKER.encode(), max(0, size - SEARCHED)), 0)
        start = data.rfind(b"\n", 0, start) + 1
        before = _newlines(data, 0, start)
        if size - start <= limit:
            return LogFile(_text(data[start:]), before)
        middle, end = start + limit // 4, size - (limit - limit // 4)
        head, gap = data[start:middle], _newlines(data, middle, end)
        return LogFile(_text(head) + "\n" + _text(data[end:]), before, head.count(b"\n") + 1, max(gap - 1, 1))


def _newlines(data: mmap.mmap, start: int, end: int, step: int = 2**24) -> int:
    return sum(data[at : min(at + step, end)].count(b"\n") for at in range(start, end, step))


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
