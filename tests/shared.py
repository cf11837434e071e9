"""Where development data lie outside the repository, if at all: SLURMLIGHT_SHARED or ../shared. Tests skip without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def shared(*parts: str) -> Path:
    """The path of a development file; skips the calling test where it is absent."""
    root = Path(os.environ.get("SLURMLIGHT_SHARED") or REPOSITORY.parent / "shared")
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path.name} is absent (development data; set SLURMLIGHT_SHARED to the folder that holds {parts[0]}/)")
    return path
