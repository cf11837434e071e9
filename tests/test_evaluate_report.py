"""The report as people get it: in a real browser, with hostile text in it, and its pieces for scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slurmlight import presets
from slurmlight.evaluate import report
from slurmlight.evaluate.config import EvalConfig
from slurmlight.evaluate.store import Answer, Store, read_parts, write_table
from slurmlight.evaluate.subject import Subject
from slurmlight.evaluate.text import markdown
from slurmlight.files import write_json

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)> | `a` \ud800 [x](javascript:1)"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def answer(index: int, **more: Any) -> Answer:
    given: dict[str, Any] = {
        "index": index, "sample": 0, "question": f"Question {index}?", "db_id": "cats" if index % 2 else "dogs",
        "gold": "SELECT 1", "hardness": ("easy", "medium", "hard", "extra")[index % 4], "answer": "SELECT 1", "first": "SELECT 1",
        "strict": 1, "official": 1, "first_strict": 1, "first_official": 1, "outcome": "match", "error": "", "reason": "",
        "vacuous": False, "unscorable": "", "turns": 1, "prompt_tokens": 100, "completion_tokens": 10, "seconds": 0.5,
        "trace": "[]", "attempt": 1,
    }  # fmt: skip
    return Answer(**given | more)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Eight of nine questions answered: one wrong with hostile text, one gained and one spoiled by the loop."""
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"step": step, "training/reward": step / 10, "val/reward": step / 12} for step in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(f"{row}\n".replace("'", '"') for row in rows))
    config = EvalConfig(
        kind="checkpoint", preset=presets.to_json(presets.load("tiny")), data="q.parquet", database_dir="d", run=str(run)
    )
    subject = Subject("run, step 5", "/models/x", 5, 9, "0123", "toy: 2 databases")
    wrong = {"strict": 0, "official": 0, "outcome": "error", "error": "no_such_column"}
    answers = [
        answer(0, **wrong, question=HOSTILE, answer=HOSTILE, first=HOSTILE, first_strict=0, first_official=0, turns=3),
        answer(1, first="SELECT 2", first_strict=0, first_official=0, turns=2),
        answer(2, **wrong | {"outcome": "rows", "error": ""}, first="SELECT 2", turns=2),
        answer(3, strict=0, outcome="columns"),
        answer(4, vacuous=True),
        *(answer(index) for index in range(5, 8)),
    ]
    folder = run / "eval" / "step-5"
    (folder / "parts").mkdir(parents=True)
    write_table(folder / "parts/001-00001.parquet", answers)
    write_json(folder / "subject.json", asdict(subject))
    return folder, report.write(folder, config, subject, {(8, 0): f"no completion: {HOSTILE}"})


def test_figures_by_hand(written: tuple[Path, dict[str, Any]]) -> None:
    _, summary = written
    strict, official = (summary["evaluators"][name] for name in ("strict", "official"))
    assert (strict["right"], official["right"], strict["questions"]) == (5, 6, 8)
    assert summary["disagree"] == {"official_only": 1, "strict_only": 0}
    assert strict["loop"] == {"first_right": 6, "final_right": 5, "gained": 1, "spoiled": 2, "episodes": 8}
    assert strict["vacuous_matches"] == 1
    assert {level: one["questions"] for level, one in strict["by_hardness"].items()} == dict.fromkeys(
        ("easy", "medium", "hard", "extra"), 2
    )
    assert strict["by_database"]["dogs"]["right"] == 2
    assert summary["turns"] == {
        "1": {"right": 4, "wrong": 1},
        "2": {"right": 1, "wrong": 1},
        "3": {"right": 0, "wrong": 1},
    }
    assert [group["kind"] for group in summary["failures"]] == ["columns", "error: no_such_column", "rows"]
    assert (summary["complete"], summary["lost"]) == (False, 1)


def test_markdown_keeps_hostile_text_on_its_line(written: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = written
    text = (folder / "report/report.md").read_text()
    assert text == markdown(summary).encode("utf-8", "replace").decode()
    assert "<script>" not in text.replace("`<script>", "").replace("\\<script\\>", "")
    assert "5 of 8 questions" in text and "Partial" in text


def test_answers_survive_text_that_is_no_unicode(written: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = written
    assert "?" in read_parts(folder)[0].answer


def test_a_part_that_was_removed_lets_no_other_be_overwritten(tmp_path: Path) -> None:
    for index in range(3):
        store = Store(tmp_path, 1)
        store.add(answer(index))
        store.flush()
    (tmp_path / "parts/001-00001.parquet").unlink()
    store = Store(tmp_path, 1)
    store.add(answer(0))
    assert store.flush() == 1
    assert sorted({one.index for one in read_parts(tmp_path)}) == [0, 1, 2]


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_the_page_opens_in_a_browser_and_no_script_runs(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = written
    page = folder / "report/report.html"
    assert set(re.findall(r' (?:src|href)="(.{5})', page.read_text())) == {"data:"}, "it needs nothing but itself"
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser", "--window-size=1100,1600"]
    done = subprocess.run([BROWSER, *flags, "--dump-dom", f"file://{page}"], capture_output=True, timeout=300)
    dom = done.stdout.decode(errors="replace")
    assert "<title>Evaluation of run, step 5</title>" in dom, done.stderr.decode(errors="replace")[-500:]
    assert "<script>" not in dom and "&lt;script&gt;" in dom
    assert dom.count("data:image/png;base64,") == 3 and "training curve" in dom
    assert "62.5 % (95 %: 30.6 to 86.3), 5 of 8 questions" in dom
