"""The preset a run trains with: RUN/config.json as launched, then RUN/adjustments.json ({dotted key: value}) over it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from slurmlight import presets
from slurmlight.errors import UserError
from slurmlight.files import read_json
from slurmlight.presets import Preset
from slurmlight.presets.rules import check
from slurmlight.runfolder import RunFolder

ADJUSTMENTS = "adjustments.json"


def read_preset(folder: Path) -> Preset:
    """Raises UserError where config.json is missing or torn, or where a key or value does not fit the schema."""
    value = read_json(RunFolder(folder).config)
    if not isinstance(value, dict):
        raise UserError(f"{folder} has no readable config.json", "start runs with launch.py, which writes it")
    adjustments = read_json(folder / ADJUSTMENTS) or {}
    for key, adjusted in adjustments.items():
        value = _set(value, key, adjusted)
    preset = presets.from_json(value)
    check(preset)
    return preset


def _set(table: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of ``table`` with the dotted ``key`` set; keys under ``verl.`` stay dotted, as in a preset."""
    result = copy.deepcopy(table)
    parents, leaf = (
        (["verl"], key.removeprefix("verl.")) if key.startswith("verl.") else (key.split(".")[:-1], key.split(".")[-1])
    )
    node = result
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise UserError(f"{ADJUSTMENTS}: '{parent}' in '{key}' is a value, not a section", "correct the dotted name")
    node[leaf] = value
    return result
