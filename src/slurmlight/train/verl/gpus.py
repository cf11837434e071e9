"""Do all GPUs work? Told from the memory they hold, as nvidia-smi shows it for this node."""

from __future__ import annotations

import subprocess

LEAST_MIB = 1024  # a CUDA context alone takes some 500


def idle_gpus(expected: int) -> list[str]:
    """One line where GPUs of the ``expected`` hold (almost) nothing after a step; none where all do or nobody can tell."""
    if not expected:
        return []
    command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return idle(text, expected)


def idle(text: str, expected: int) -> list[str]:
    """``text`` is a line "index, MiB" for each GPU of the node; others than the job's may be among them."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not all(len(row) == 2 and row[1].isdecimal() for row in rows):  # "[N/A]": a driver that does not tell
        return []
    used = [(gpu, int(mib)) for gpu, mib in rows]
    busy = sum(mib >= LEAST_MIB for _, mib in used)
    if busy >= expected:
        return []
    names = ", ".join(gpu for gpu, mib in used if mib < LEAST_MIB)
    return [f"{expected - busy} of {expected} GPUs idle after the first step (no memory in use on GPU {names})"]
