"""Every key of a preset with its type, default and doc line, for people: read from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import msgspec.inspect as inspect

from slurmlight.presets.schema import Preset


@dataclass(frozen=True)
class Key:
    """One dotted key; ``default`` as JSON holds it. A ``required`` one has none."""

    name: str
    kind: str
    default: Any
    required: bool
    about: str


def keys() -> list[Key]:
    """In the schema's order, a section's own keys before those of the sections in it; optional sections too."""
    return list(_keys(inspect.type_info(Preset), ""))


def value(preset: Preset, name: str) -> Any:
    """What ``preset`` has under a dotted key, as JSON holds it; None in a section it does without.

    A key of a table in a list (``reward[].weight``) has one value a table.
    """
    return _plain(_inside(preset, name.split(".")))


def _inside(here: Any, where: list[str]) -> Any:
    for place, part in enumerate(where):
        if here is not None and part.endswith("[]"):
            return [_inside(one, where[place + 1 :]) for one in getattr(here, part.removesuffix("[]"))]
        here = None if here is None else getattr(here, part)
    return here


def _keys(struct: inspect.Type, prefix: str) -> Iterator[Key]:
    assert isinstance(struct, inspect.StructType)
    for field in struct.fields:
        if _section(field.type) is None:
            default = None if field.required else _plain(_default(field))
            yield Key(prefix + field.name, _kind(field.type), default, field.required, _about(field.type))
        if (table := _table(field.type)) is not None:
            yield from _keys(table, f"{prefix}{field.name}[].")
    for field in struct.fields:
        if (section := _section(field.type)) is not None:
            yield from _keys(section, f"{prefix}{field.name}.")


def _section(kind: inspect.Type) -> inspect.StructType | None:
    return next((one for option in _options(kind) if isinstance(one := _bare(option), inspect.StructType)), None)


def _table(kind: inspect.Type) -> inspect.StructType | None:
    """What a list of tables holds."""
    found = _bare(kind)
    return _section(found.item_type) if isinstance(found, inspect.VarTupleType) else None


def _options(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _default(field: inspect.Field) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _about(kind: inspect.Type) -> str:
    found = (one.extra_json_schema or {} for one in _options(kind) if isinstance(one, inspect.Metadata))
    return next((text["description"] for text in found if "description" in text), "")


def _kind(kind: inspect.Type) -> str:
    """The type as a person would write it, with its bounds: ``integer >= 1``, ``vllm | embedded``, ``list of text``."""
    match kind := _bare(kind):
        case inspect.UnionType():
            return " | ".join(_kind(one) for one in kind.types)
        case inspect.LiteralType():
            return " | ".join(str(one) for one in kind.values)
        case inspect.VarTupleType():
            return "list of tables" if _table(kind) else f"list of {_kind(kind.item_type)}"
        case inspect.TupleType():
            return f"[{', '.join(_kind(one) for one in kind.item_types)}]"
        case inspect.IntType() | inspect.FloatType():
            bounds = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
            name = "integer" if isinstance(kind, inspect.IntType) else "number"
            return " ".join([name, *(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)])
    names = {inspect.StrType: "text", inspect.BoolType: "true | false", inspect.NoneType: "none", inspect.DictType: "table"}
    return names[type(kind)]


def _plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))
