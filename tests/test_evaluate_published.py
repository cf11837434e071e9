"""A published system's predictions through the whole harness: the report's official verdicts are the recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmlight.evaluate.store import read_parts
from slurmlight.evaluating import Asked
from slurmlight.files import read_json
from tests.evalbed import Scripted, evaluate, published, replay, unpack_spider, write_questions
from tests.shared import shared

SYSTEM = "graphix"


def test_the_official_accuracy_of_a_published_system_is_the_recorded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts, archive = shared("data", "verdicts-a.tsv.gz"), shared("data", "spider.tar.gz")
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    spider = unpack_spider(archive, tmp_path)
    rows = published(verdicts, spider, SYSTEM)
    assert len(rows) > 300
    data = write_questions(spider, rows)
    with Scripted(replay({row["question"].strip(): row["pred"] for row in rows})) as server:
        flags = Asked(preset="fast", endpoint=server.url, model=SYSTEM, data=str(data), name=SYSTEM, in_flight=16)
        code, folder = evaluate(flags)
    summary = read_json(folder.path / "report/summary.json") or {}
    official = summary["evaluators"]["official"]
    assert code == 0 and summary["complete"]
    assert (official["right"], official["questions"]) == (sum(row["official"] for row in rows), len(rows))
    ours = {one.index: one.official for one in read_parts(folder.path)}
    assert not [row["question"] for index, row in enumerate(rows) if ours[index] != row["official"]]
    by_hardness = official["by_hardness"]
    assert sum(level["questions"] for level in by_hardness.values()) == len(rows)
    used = len({row["db_id"] for row in rows})
    assert f"{used} databases, one instance each" in summary["subject"]["databases"]
