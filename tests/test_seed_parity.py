"""The same episodes give the same rows and advantages in both stacks, to the last bit (marks ``seed`` and ``stack``)."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.reference import transition

RECORDED = json.loads(Path(transition.__file__).with_suffix(".json").read_text())


def verl_is(number: str) -> bool:
    try:
        return version("verl") == number
    except PackageNotFoundError:
        return False


@pytest.mark.seed
@pytest.mark.skipif(not verl_is("0.5.0"), reason="the seed stack is not installed (make test-seed)")
def test_the_seed_stack_gives_the_recorded_rows() -> None:
    assert transition.seed() == RECORDED["rows"]


@pytest.mark.stack
@pytest.mark.skipif(not verl_is(RECORDED["verl"]), reason=f"verl {RECORDED['verl']} is not installed (requirements-stack.lock)")
def test_the_record_is_what_the_current_stack_gives() -> None:
    assert transition.current() == RECORDED["rows"]
