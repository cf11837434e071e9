"""How a run uses SwanLab: cloud with a key, offline without an account; one run id for its whole life. Imports no SwanLab."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from slurmlight.errors import UserError, unknown_name
from slurmlight.files import write_atomic

Mode = Literal["cloud", "local", "offline", "disabled"]
KEY = "SWANLAB_API_KEY"

_MODES: dict[str, Mode] = {"cloud": "cloud", "online": "cloud", "local": "local", "offline": "offline", "disabled": "disabled"}
_RUN_ID = re.compile(r"^[a-z0-9]{21}$")  # what SwanLab 0.7.5 accepts


def choose_mode(logger: Sequence[str], environment: Mapping[str, str]) -> Mode:
    """The mode of a run with trainer.logger ``logger``: SWANLAB_MODE, else cloud where a key is set, else offline.

    Raises UserError for what SwanLab would refuse only on the node: cloud without a key, a run id that is none, resuming
    outside the cloud. ``launch`` asks before it submits.
    """
    if "swanlab" not in logger:
        return "disabled"
    asked = environment.get("SWANLAB_MODE") or ("cloud" if environment.get(KEY) else "offline")
    if asked not in _MODES:
        raise unknown_name("SWANLAB_MODE", asked, _MODES)
    mode = _MODES[asked]
    if mode == "cloud" and not environment.get(KEY):
        raise UserError(
            f"SWANLAB_MODE={asked} needs the environment variable {KEY}, which is not set",
            f"export {KEY}, or unset SWANLAB_MODE to write offline files that can be uploaded later",
        )
    run_id = environment.get("SWANLAB_RUN_ID", "")
    if run_id and not _RUN_ID.match(run_id):
        raise UserError(
            f"SWANLAB_RUN_ID={run_id!r} is no SwanLab run id: 21 characters of a-z and 0-9",
            "unset it: the kit makes one and keeps it in the run folder",
        )
    if mode != "cloud" and environment.get("SWANLAB_RESUME") == "must":
        raise UserError(
            f"SWANLAB_RESUME=must in {mode} mode: SwanLab resumes in cloud mode only",
            f"unset it, and upload RUN/swanlab later with 'swanlab sync', or export {KEY}",
        )
    return mode


def run_id(folder: Path, environment: Mapping[str, str]) -> str:
    """The SwanLab run id of the run in ``folder``: the same in every attempt (SWANLAB_RUN_ID wins, made up else)."""
    path = folder / "swanlab" / "run_id"
    if given := environment.get("SWANLAB_RUN_ID"):
        return given
    try:
        kept = path.read_text().strip()
    except OSError:
        kept = ""
    if not _RUN_ID.match(kept):
        kept = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(21))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, kept + "\n")
    return kept
