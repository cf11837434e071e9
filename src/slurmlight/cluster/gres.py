"""GPUs in Slurm's two spellings: GRES (``gpu:a800:4(S:0-1)``) and TRES (``gres/gpu:a800=4``); what a partition offers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from slurmlight.errors import UserError, unknown_name

_ITEM = re.compile(r"^(?:gres:)?(?P<name>[A-Za-z]\w*)(?P<types>(?::[\w.+-]+)*?)(?::(?P<count>\d+)[KMG]?)?$")
_NOTHING = ("", "(null)", "N/A", "none", "0")


class GresError(UserError):
    """The text is not in that spelling."""


def read_gres(text: str) -> dict[str, int]:
    """GPUs by type in a GRES text (``sinfo %G``, a node's ``Gres=``, a request); type "" where none is given.

    Sockets and indices in brackets are left out, other resources too. Raises GresError, for TRES text as well.
    """
    if text.strip() in _NOTHING:
        return {}
    gpus: dict[str, int] = {}
    for item in re.sub(r"\([^()]*\)", "", text).split(","):
        match = _ITEM.match(item.strip())
        if not match:
            raise GresError(f"'{text[:80]}' is not a GRES text", "expected for instance gpu:a800:4")
        if match["name"] == "gpu":
            kind = next((part for part in match["types"].split(":") if part not in ("", "no_consume")), "")
            gpus[kind] = gpus.get(kind, 0) + int(match["count"] or 1)
    return gpus


def read_tres(text: str) -> dict[str, int]:
    """GPUs by type in a TRES text (``cpu=8,mem=64G,gres/gpu=4,gres/gpu:a800=4``); what has no type is under "".

    Raises GresError.
    """
    if text.strip() in _NOTHING:
        return {}
    total, gpus = 0, dict[str, int]()
    for item in text.split(","):
        name, separator, value = item.strip().partition("=")
        if not separator:
            raise GresError(f"'{text[:80]}' is not a TRES text", "expected for instance cpu=8,gres/gpu:a800=4")
        if name == "gres/gpu":
            total += _count(value, text)
        elif name.startswith("gres/gpu:"):
            kind = name.removeprefix("gres/gpu:")
            gpus[kind] = gpus.get(kind, 0) + _count(value, text)
    if total > sum(gpus.values()):
        gpus[""] = total - sum(gpus.values())
    return gpus


def _count(value: str, text: str) -> int:
    if not value.isdecimal():
        raise GresError(f"'{text[:80]}' has a GPU count that is no number", "expected for instance gres/gpu=4")
    return int(value)


def fit(partition: str, offers: Iterable[str], gpus: int, gpu_type: str = "") -> str:
    """The GPU type to ask for ("" for any) where a job wants ``gpus`` of ``gpu_type`` ("": any) a node.

    ``offers`` are the GRES lines of ``sinfo -h -p P -o %G``; nodes may differ, one kind of node must be able. Raises UserError
    with both numbers and the partition's name where none is.
    """
    lines = list(dict.fromkeys(line.strip() for line in offers))
    nodes = [read_gres(line) for line in lines]
    kinds = sorted({kind for node in nodes for kind in node})
    if not kinds:
        raise UserError(f"{gpus} GPUs a node are asked for and partition '{partition}' has none", "choose another partition")
    if gpu_type and gpu_type not in kinds and "" not in kinds:
        raise unknown_name(f"GPU type in partition '{partition}':", gpu_type, kinds)
    best = max(_usable(node, gpu_type) for node in nodes)
    if gpus > best:
        raise UserError(
            f"{gpus} GPUs a node are asked for and partition '{partition}' has at most {best} ({', '.join(lines)})",
            f"ask for {best} GPUs on more nodes, or choose another partition",
        )
    able = {kind for node in nodes for kind in node if _usable(node, gpu_type) >= gpus}
    only = able.pop() if len(able) == 1 else ""
    return gpu_type if gpu_type in kinds else only


def _usable(node: Mapping[str, int], gpu_type: str) -> int:
    return sum(count for kind, count in node.items() if not gpu_type or kind in (gpu_type, ""))
