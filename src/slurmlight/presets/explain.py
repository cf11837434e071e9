"""What msgspec says of a preset that does not fit, put for people: the dotted key, the nearest names, the field's doc line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec.inspect

from slurmlight.errors import UserError, unknown_name
from slurmlight.presets.schema import Preset

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"Object (?P<kind>contains unknown|missing required) field `(?P<name>[^`]+)`")


def explain(message: str, value: Any) -> UserError:
    """``message`` is msgspec's; ``value`` the table it was about."""
    match = _AT.match(message)
    what, where = (match["what"], match["where"] or "") if match else (message, "")
    parents = [part for part in where.split(".") if part]
    if found := _FIELD.match(what):
        key = ".".join([*parents, found["name"]])
        if found["kind"] == "missing required":
            return UserError(f"preset has no '{key}'", "add it to the preset")
        place = f"key under {'.'.join(parents)}:" if parents else "key"
        return unknown_name(place, found["name"], _fields(parents))
    for part in parents:
        value = _get(value, part)
    return UserError(f"{where}={value!r}: {what[:1].lower()}{what[1:]}", _documented(parents))


def _get(value: Any, part: str) -> Any:
    """``value`` under a name, or under a place in a list: reward[0]."""
    name, _, place = part.rstrip("]").partition("[")
    found: Any = value.get(name) if isinstance(value, Mapping) else value
    return found[int(place)] if place.isdigit() else found


def _field(where: list[str]) -> msgspec.inspect.Field | None:
    """The schema's field at a dotted place; None where there is none."""
    kind: Any = msgspec.inspect.type_info(Preset)
    found = None
    for part in where:
        kind = _struct(kind)
        found = next((field for field in kind.fields if field.name == part.partition("[")[0]), None) if kind else None
        if found is None:
            return None
        kind = found.type
    return found


def _struct(kind: Any) -> msgspec.inspect.StructType | None:
    inner = [kind, *getattr(kind, "types", ()), getattr(kind, "type", None)]
    inner += [getattr(one, "item_type", None) for one in inner]  # of a list of tables
    return next((one for one in inner if isinstance(one, msgspec.inspect.StructType)), None)


def _fields(where: list[str]) -> list[str]:
    found = _field(where) if where else None
    struct = _struct(found.type if found else msgspec.inspect.type_info(Preset))
    return [field.name for field in struct.fields] if struct else []


def _documented(where: list[str]) -> str:
    found = _field(where)
    if found is None:
        return "correct the value"
    kind, about = found.type, ""
    if isinstance(kind, msgspec.inspect.Metadata):
        kind, about = kind.type, (kind.extra_json_schema or {}).get("description", "")
    valid = f"valid: {', '.join(map(str, kind.values))}" if isinstance(kind, msgspec.inspect.LiteralType) else ""
    default = "" if found.required else f"default {found.default!r}"
    return " - ".join(part for part in (valid, default, about) if part) or "correct the value"
