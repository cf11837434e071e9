"""The killable process: same answers, a sure end, nobody left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurmlight.sql.execute import DatabaseMissing, Limits
from slurmlight.sql.worker import Died, Overdue, Worker
from tests.sqlbed import build


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_answers_as_the_executor_does(tmp_path: Path) -> None:
    database = build(tmp_path / "emp.sqlite")
    with Worker() as worker:
        assert worker.execute(database, "SELECT count(*) FROM emp").rows == [(5,)]
        assert worker.execute(database, "SELECT last FROM person WHERE id = 2").rows == [("Mu\udcf1oz",)]
        assert worker.execute(database, "DROP TABLE emp").kind == "refused"
        with pytest.raises(DatabaseMissing, match="no database"):
            worker.execute(tmp_path / "none.sqlite", "SELECT 1")
        process = worker.call(os.getpid, timeout_s=60)
    assert process != os.getpid()
    assert not alive(process)


def test_what_nothing_interrupts_is_killed_and_the_next_call_works() -> None:
    with Worker() as worker:
        first = worker.call(os.getpid, timeout_s=60)
        with pytest.raises(Overdue):
            worker.call(time.sleep, 3600, timeout_s=0.1)
        assert not alive(first)
        with pytest.raises(Died):
            worker.call(os._exit, 1, timeout_s=60)
        assert worker.call(os.getpid, timeout_s=60) != first


def nap(database: Path, sql: str, limits: Limits) -> None:
    """Stands for a C call that no handler interrupts."""
    time.sleep(3600)


def test_a_query_that_had_to_be_killed_is_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr("slurmlight.sql.worker.execute", nap)
    with Worker() as worker:
        worker.call(os.getpid, timeout_s=60)
        result = worker.execute(build(tmp_path / "emp.sqlite"), "SELECT 1", Limits(timeout_s=0.1))
    assert (result.kind, result.error) == ("timeout", "killed")
