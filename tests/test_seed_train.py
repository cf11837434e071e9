"""The seed engine on a CPU, everything real: stop, resume and finish, the weights vLLM samples with, deaths, two jobs (mark ``seed``)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from slurmlight.evaluate.merge import model_folder
from slurmlight.files import read_json, read_json_lines
from slurmlight.runfolder import RunFolder
from slurmlight.train.checkpoints import newest_complete
from tests import seedbed
from tests.runs import wait_for
from tests.shared import REPOSITORY

pytestmark = pytest.mark.seed
pytest.importorskip("agentlightning.verl.daemon", reason="the seed stack is not installed (make test-seed)")

LIMIT_S = 420.0  # an attempt takes 75 s on two idle cores


@contextmanager
def started(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The payload of ``run`` as its own process, its words in log.txt; killed afterwards if it still lives."""
    with open(run / "log.txt", "ab") as log:
        command = [sys.executable, "-m", "tests.seedbed", str(run)]
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "SEEDBED_RUN": str(run)}
        process = subprocess.Popen(command, cwd=run, env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        for one in family(run):
            one.kill()
        process.wait()


def family(run: Path) -> list[psutil.Process]:
    """Every living process of ``run``, by the mark in its environment."""
    found = []
    for one in psutil.process_iter():
        try:
            if one.environ().get("SEEDBED_RUN") == str(run) and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except psutil.Error:
            continue
    return found


def rows(run: Path) -> list[dict[str, Any]]:
    return RunFolder(run).metric_rows()


def told(run: Path) -> str:
    return (run / "log.txt").read_text(errors="replace")


def await_row(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    def there() -> bool:
        assert process.poll() is None, told(run)[-3000:]
        return any(row["step"] >= step for row in rows(run))

    wait_for(there, f"the row of step {step}", LIMIT_S)


def none_left(run: Path) -> None:
    """Ray's two agents look after their raylet once a minute; all others go at once."""
    try:
        wait_for(lambda: not family(run), "the last process of the run to end", 240)
    except AssertionError:
        pytest.fail(f"left behind: {[(one.name(), one.cmdline()[:4]) for one in family(run)]}")


def test_stop_resume_finish(tmp_path: Path) -> None:
    import torch

    run = seedbed.make_run(tmp_path)
    with started(run) as process:
        await_row(run, 1, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 75, told(run)[-3000:]
        none_left(run)
    saved = newest_complete(run)
    assert saved is not None and saved.step in (1, 2) and saved.world_size == 1
    first = [row["step"] for row in rows(run)]
    assert first == list(range(saved.step + 1))
    handed = len(list(read_json_lines(run / "weights.jsonl")))

    with started(run) as process:
        assert process.wait(LIMIT_S) == 0, told(run)[-3000:]
        none_left(run)
    assert read_json(run / "finished.json")["step"] == 3
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3]
    validated = [row["step"] for row in rows(run) if "val/reward" in row]
    assert validated == [0, 3]

    weights = list(read_json_lines(run / "weights.jsonl"))
    assert all(line["difference"] == 0.0 for line in weights), weights  # to the last bit, at every hand-over
    trained = torch.load(saved.path / "actor/model_world_size_1_rank_0.pt", weights_only=False)
    tied = {weight.data_ptr(): weight for name, weight in trained.items() if name != "lm_head.weight"}
    total = sum(weight.double().abs().sum().item() for weight in tied.values())
    assert weights[handed]["sum"] == pytest.approx(total, abs=1e-6)  # the resumed run samples with the saved weights
    assert len({line["sum"] for line in weights}) == 4  # of the start and of each step

    last = newest_complete(run)
    assert last is not None and last.step == 3
    assert model_folder(last, tmp_path / "models/random") == run / "merged/global_step_3"  # evaluation can serve it
    with started(run) as process:
        assert process.wait(LIMIT_S) == 0
    assert "nothing to do" in told(run)


def test_an_error_inside_the_vllm_worker_ends_the_run_with_its_words(tmp_path: Path) -> None:
    run = seedbed.make_run(tmp_path, overrides=["trainer.total_training_steps=200", "trainer.test_freq=0"])
    with started(run) as process:
        await_row(run, 1, process)
        (run / "worker-fault").write_text("execute_model")
        assert process.wait(LIMIT_S) == 1
        none_left(run)
    last = told(run).strip().splitlines()[-1]
    assert last.startswith("slurmlight: the vLLM worker failed in execute_model: RuntimeError: no cats in this worker; start")


def test_two_jobs_on_one_node_and_the_end_of_one(tmp_path: Path) -> None:
    """Neither port nor lock is shared; killing one leaves nothing of it, and the other finishes."""
    one = seedbed.make_run(tmp_path, "one", ["trainer.total_training_steps=200", "trainer.test_freq=0"])
    two = seedbed.make_run(tmp_path, "two", ["trainer.test_freq=0"])
    with started(one) as first, started(two) as second:
        await_row(one, 1, first)
        first.kill()
        none_left(one)
        assert second.wait(LIMIT_S) == 0, told(two)[-3000:]
        none_left(two)
    assert [row["step"] for row in rows(two)] == [1, 2, 3]
    assert read_json(two / "finished.json")["step"] == 3
