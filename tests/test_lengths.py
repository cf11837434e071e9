"""Questions that are too long are left out and counted, never cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurmlight.errors import UserError
from slurmlight.train.config import read_preset
from slurmlight.train.embedded.prepare import load_splits
from slurmlight.train.lengths import fitting
from tests import trainbed


def test_long_questions_are_left_out_and_counted(tmp_path: Path) -> None:
    run = trainbed.make_run(tmp_path, overrides=["data.max_prompt_length=64"])
    preset = read_preset(run)
    tasks = load_splits(preset)["train"]
    assert fitting(preset, "train", tasks) == (tasks, "")
    long = replace(tasks[0], task_id="long", question="was it right? " * 100)
    kept, told = fitting(preset, "train", [*tasks, long])
    assert kept == tasks
    assert told.startswith(
        f"1 of {len(tasks) + 1} questions of train left out: longer than data.max_prompt_length=64 (longest: "
    )
    with pytest.raises(
        UserError, match=r"no question of train fits data.max_prompt_length=64: the shortest prompt takes \d+ tokens"
    ):
        fitting(preset, "train", [long])
