"""EVAL/report/: summary.json, report.md, report.html (one file, pictures inside) and answers.parquet."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmlight.evaluate import pictures
from slurmlight.evaluate.compare import check_other, compare, find_other
from slurmlight.evaluate.config import EvalConfig
from slurmlight.evaluate.page import html
from slurmlight.evaluate.store import Key, read_parts, write_table
from slurmlight.evaluate.subject import Subject
from slurmlight.evaluate.summary import summarise
from slurmlight.evaluate.text import markdown
from slurmlight.files import write_atomic, write_json
from slurmlight.runfolder import RunFolder
from slurmlight.tracking.names import SECONDS, series


def write(folder: Path, config: EvalConfig, subject: Subject, failed: Mapping[Key, str]) -> dict[str, Any]:
    """Write the report of what has been answered so far and return its summary.

    Raises UserError where it is to be compared with an evaluation that measures something else, OSError.
    """
    answers = read_parts(folder)
    seconds = sum(series(RunFolder(folder).metric_rows(), SECONDS).values())
    summary = summarise(folder.name, config, subject, answers, failed, seconds)
    if other := find_other(folder, config, subject):
        check_other(config, subject, other)
        summary["against"] = compare(answers, other)
    out = folder / "report"
    out.mkdir(exist_ok=True)
    write_json(out / "summary.json", summary)
    write_table(out / "answers.parquet", answers)
    write_atomic(out / "report.md", _utf8(markdown(summary)))
    write_atomic(out / "report.html", _utf8(html(summary, _pictures(config, summary))))
    return summary


def _pictures(config: EvalConfig, summary: Mapping[str, Any]) -> dict[str, bytes]:
    found = {
        "accuracy by hardness with 95 % intervals": pictures.by_hardness(summary),
        "episodes by queries written": pictures.turns(summary),
    }
    with tempfile.TemporaryDirectory(prefix="sl-eval-") as scratch:
        curve = pictures.training_curve(config.run, Path(scratch))
    if curve:
        found["training curve: reward (sampled) and validation (greedy, on the validation questions)"] = curve
    return found


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")
