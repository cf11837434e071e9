"""Presets: what to train, as typed TOML. ``load`` gives a preset by name or file, with overrides, checked.

A preset may start from another one: ``base = "qwen"`` as its first line; its own keys win.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from slurmlight.errors import UserError, unknown_name
from slurmlight.presets.rules import check, warnings
from slurmlight.presets.schema import Preset
from slurmlight.secrets import is_secret_name, redact

__all__ = ["Preset", "from_json", "load", "names", "resolve", "to_json", "warnings"]

FOLDER = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str, overrides: Iterable[str] = ()) -> Preset:
    """The preset called ``name`` (or the TOML file at that path) with ``key=value`` overrides applied.

    Raises UserError for an unknown preset or key, a value of the wrong type, or a combination known not to work.
    """
    try:
        return resolve(_table(name), overrides)
    except RecursionError:
        raise UserError(f"preset {name} with its overrides is nested too deep", "no key of a preset is that deep") from None


def resolve(table: Mapping[str, Any], overrides: Iterable[str] = ()) -> Preset:
    merged = copy.deepcopy(dict(table))
    for text in overrides:
        _override(merged, text)
    preset = from_json(merged)
    check(preset)
    return preset


def to_json(preset: Preset) -> dict[str, Any]:
    """``preset`` as JSON holds it: lists where the preset has tuples."""
    return json.loads(msgspec.json.encode(preset))


def from_json(value: Mapping[str, Any]) -> Preset:
    """A preset as ``to_json`` wrote it. Raises UserError for unknown keys and values of the wrong type."""
    try:
        return msgspec.convert(value, Preset)
    except msgspec.ValidationError as error:
        from slurmlight.presets.explain import explain  # its type inspection is only worth loading for an error

        raise explain(str(error), value) from None


def _table(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys of a preset, those of its base under them; ``above`` are the presets that start from it."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if path.parent == FOLDER and path.stem not in names():
        raise unknown_name("preset", name, names())
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"preset file {path} does not exist", f"give one of {', '.join(names())} or a TOML file") from None
    except OSError as error:
        raise UserError(f"preset file {path} cannot be read ({error.strerror})", "give a TOML file you may read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"preset file {path} is not TOML ({error})", "correct that line") from None
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str) or base in (*above, name):
        raise UserError(f"preset {name} has base = {base!r}", 'name another preset, for instance base = "qwen"')
    return _merge(_table(base, (*above, name)), table)


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in top.items():
        inner = base.get(key)
        base[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return base


def _override(table: dict[str, Any], text: str) -> None:
    key, separator, raw = text.partition("=")
    if not separator or not key:
        raise UserError(f"override '{redact(text)}' has no value", "write it as key=value, for instance trainer.save_freq=5")
    if key.split(".")[0] in ("env", "environment") or is_secret_name(key.rpartition(".")[2]):
        raise UserError(f"override '{key}' would put a value of the environment on the command line", "export it instead")
    if key.startswith("verl."):
        table.setdefault("verl", {})[key.removeprefix("verl.")] = _value(raw)
        return
    node = table
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise UserError(f"override '{key}': '{parent}' is a value, not a section", "check the dotted name")
    node[leaf] = raw if _is_text(key.split(".")) else _value(raw)


def _value(raw: str) -> Any:
    """``raw`` as a TOML value (numbers stay numbers), true/false/none in any case, else a string. Nothing is executed."""
    if raw.lower() in ("none", "null"):
        return None
    if raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    try:
        return tomllib.loads(f"value = {raw}")["value"] if "\n" not in raw else raw
    except tomllib.TOMLDecodeError:
        return raw


def _is_text(where: list[str]) -> bool:
    """Whether the field at a dotted place is a plain string: ``--time 30`` is text, not a number."""
    kind: Any = Preset
    for part in where:
        kind = getattr(kind, "__annotations__", {}).get(part)
        while args := get_args(kind):  # Annotated[X, ...] and X | None
            kind = args[0]
    return kind is str
