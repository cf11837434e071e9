"""verl's key names, for both engines that drive it: what a preset says of them, and whether a version knows a key."""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig

from slurmlight.errors import UserError, unknown_name
from slurmlight.presets import Preset, to_json

SECTIONS = ("data", "algorithm", "actor_rollout_ref", "trainer")
# Keys of the preset that this kit acts on itself; verl has no key of that name or must not act on it.
KIT_ONLY = {
    *(f"data.{name}" for name in ("train_files", "val_files", "test_files", "unseen_files", "database_dir", "instances")),
    *(f"trainer.{name}" for name in ("logger", "keep_best", "keep_every", "max_actor_ckpt_to_keep", "resume_mode")),
    "actor_rollout_ref.rollout.enable_auto_tool_choice",
    "actor_rollout_ref.rollout.tool_call_parser",
}


def from_preset(preset: Preset) -> dict[str, Any]:
    """The preset's values under verl's dotted names."""
    table = to_json(preset)
    return {name: value for name, value in flat({name: table[name] for name in SECTIONS}) if name not in KIT_ONLY}


def flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in table.items():
        found += flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return found


def check_known(config: DictConfig, name: str) -> None:
    """Raises UserError where ``config``, a version's whole default configuration, has no key of that dotted name."""
    node: Any = config
    *parents, leaf = name.split(".")
    for depth, part in enumerate([*parents, leaf]):
        if not isinstance(node, DictConfig):
            raise UserError(f"verl key '{name}': '{'.'.join(parents[:depth])}' is a value, not a section", "check the name")
        valid = set(map(str, node.keys())) | _fields(node)  # "in node" is false for mandatory values that are still missing
        if part not in valid:
            section = ".".join(parents[:depth])
            raise unknown_name(f"verl key under {section or 'the root'}:", part, valid)
        node = node._get_node(part)


def _fields(node: DictConfig) -> set[str]:
    """The fields of the dataclass that verl makes of a section; its YAML files do not list all of them."""
    target = node.get("_target_")
    return {field.name for field in dataclasses.fields(get_class(target))} if target else set()
