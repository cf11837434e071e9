"""Going back to the last good checkpoint: what lies after it is set aside, and RUN/fallbacks.json remembers it for good.

Killed between the two, a run repeats the steps that were set aside, with the same outcome, and falls back again.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from slurmlight.files import read_json, sync_folder, write_json
from slurmlight.train.checkpoints import TRACKER, Checkpoint, scan, write_tracker

RECORD = "fallbacks.json"
_ASIDE = re.compile(r"^alarm_step_\d+$")


def fallbacks(folder: Path) -> list[dict[str, Any]]:
    """Those that a run has made, oldest first."""
    found = read_json(folder / RECORD)
    return found if isinstance(found, list) else []


def last_good(folder: Path, since: int) -> Checkpoint | None:
    """The newest complete checkpoint of a step before ``since``."""
    return next((one for one in reversed(scan(folder)) if one.complete and one.step < since), None)


def go_back(folder: Path, to_step: int, why: str, at_step: int) -> None:
    """Make ``to_step`` (0: the start) the newest checkpoint; the newest of those after it is kept as alarm_step_N."""
    later = [one for one in scan(folder) if one.step > to_step]
    for name in filter(_ASIDE.match, os.listdir(folder)):
        shutil.rmtree(folder / name, ignore_errors=True)
    if to_step:
        write_tracker(folder, to_step)
    else:
        (folder / TRACKER).unlink(missing_ok=True)
    for one in later[:-1]:
        os.rename(one.path, trash := folder / f".{one.path.name}.trash")
        shutil.rmtree(trash, ignore_errors=True)
    for one in later[-1:]:
        os.rename(one.path, folder / f"alarm_step_{one.step}")
    sync_folder(folder)
    write_json(folder / RECORD, [*fallbacks(folder), {"at_step": at_step, "to_step": to_step, "why": why}])
