"""Slurm's spelling of a time limit."""

from __future__ import annotations

import re

from slurmlight.errors import UserError

_FORMS = re.compile(r"^(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?$")


def minutes(text: str) -> float | None:
    """Minutes in ``text`` as sbatch reads it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for UNLIMITED or INFINITE.

    Raises UserError for anything else.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _FORMS.match(text.strip())
    if match is None:
        raise UserError(f"'{text}' is not a time limit", "write minutes, HH:MM:SS or D-HH:MM:SS, for instance 24:00:00")
    days, a, b, c = (int(match[name]) if match[name] else None for name in "dabc")
    if days is not None:
        return days * 1440 + (a or 0) * 60 + (b or 0) + (c or 0) / 60
    if c is not None:
        return (a or 0) * 60 + (b or 0) + c / 60
    return (a or 0) + (b or 0) / 60
