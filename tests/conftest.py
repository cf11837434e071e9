"""Fixtures shared by all tests: a real Slurm, brought up once and tidied between tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import slurmbed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first (whole stacks, then clusters, images, trainings): make test deals files to two processes, which then end together."""
    items.sort(key=lambda item: [mark not in item.keywords for mark in ("stack", "slurm", "image", "train")])


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurmbed.SlurmBed]:
    """A cluster that is up for the whole session. Skips where no Slurm is installed; with CI=true that is a failure."""
    if why := slurmbed.missing():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a real Slurm: {why}")
        pytest.skip(f"no Slurm: {why}")
    with slurmbed.SlurmBed() as bed:
        yield bed


@pytest.fixture
def cluster(slurm: slurmbed.SlurmBed, monkeypatch: pytest.MonkeyPatch) -> Iterator[slurmbed.SlurmBed]:
    """That cluster with idle nodes and no jobs, and this process (and its children) pointed at it."""
    slurm.wait_idle()
    for name in set(os.environ) - set(slurm.env):
        monkeypatch.delenv(name)
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    yield slurm
    slurm.restore_all()
    slurm.cancel_all()
