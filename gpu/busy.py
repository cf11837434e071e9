"""GPU busy share and memory by phase of a run:  python gpu/busy.py RUN_FOLDER OUT.json   (until it is terminated)

"Busy" is nvidia-smi's utilization: the share of the last sampling period in which a kernel ran.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

QUERY = "--query-gpu=index,utilization.gpu,memory.used"


def main() -> None:
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    seen: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    command = ["nvidia-smi", QUERY, "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as smi:
        assert smi.stdout is not None
        try:
            for line in smi.stdout:
                gpu, busy, memory = (int(part) for part in line.split(","))
                seen[_phase(run), str(gpu)].append((busy, memory))
        finally:
            smi.kill()
            out.write_text(
                json.dumps({f"{phase}/gpu{gpu}": _sum(rows) for (phase, gpu), rows in sorted(seen.items())}, indent=1)
            )


def _phase(run: Path) -> str:
    try:
        return json.loads((run / "status.json").read_text())["phase"]
    except (OSError, ValueError, KeyError):
        return "none"


def _sum(rows: list[tuple[int, int]]) -> dict[str, float]:
    busy = [one for one, _ in rows]
    return {
        "samples": len(rows),
        "busy": round(sum(busy) / len(rows) / 100, 3),
        "memory_gib": max(mem for _, mem in rows) / 1024,
    }


if __name__ == "__main__":
    main()
