"""The end of a run for people: result table, curve, three before/after questions; and RUN/report/ for scripts.

An engine calls ``write_report`` and ``end_view`` once; ``slurmlight report`` reads ``read_report`` and shows the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slurmlight.files import read_json, write_json
from slurmlight.runfolder import RunFolder
from slurmlight.tracking.curve import curve_png, curve_text
from slurmlight.tracking.names import REWARD, SECONDS, VALIDATION, series

Stage = Literal["clean", "start", "after"]
STAGES: dict[Stage, str] = {"clean": "before it was weakened", "start": "start of RL", "after": "after RL"}


@dataclass(frozen=True)
class Score:
    """Greedy answers on the questions of one ``split`` (test, unseen ...) at one ``stage``: ``right`` of ``questions``.

    Stage clean is the warm start before bad habits were taught on purpose (only the tiny policy has it).
    """

    split: str
    stage: Stage
    right: int
    questions: int


@dataclass(frozen=True)
class Example:
    """One question answered before and after training."""

    question: str
    db_id: str
    gold: str
    before: str
    after: str
    before_right: bool
    after_right: bool


def pick_examples(examples: Iterable[Example], count: int = 3) -> list[Example]:
    """Learned ones first (wrong before, right after), then those still wrong, then right both times, then unlearned;
    one a database before a second of the same, in the order given."""
    ranks = {(False, True): 0, (False, False): 1, (True, True): 2, (True, False): 3}
    ranked = sorted(examples, key=lambda one: ranks[one.before_right, one.after_right])
    seen: dict[str, int] = {}
    order: list[tuple[int, int, int, Example]] = []
    for index, one in enumerate(ranked):
        seen[one.db_id] = seen.get(one.db_id, 0) + 1
        order.append((ranks[one.before_right, one.after_right], seen[one.db_id], index, one))
    return [one for *_, one in sorted(order, key=lambda item: item[:3])[:count]]


def write_report(run: RunFolder, scores: Sequence[Score] = (), examples: Sequence[Example] = ()) -> Path:
    """Write RUN/report/{summary.json, examples.json, curve.png}, each atomically; the folder. Raises OSError."""
    folder = run.path / "report"
    folder.mkdir(parents=True, exist_ok=True)
    rows = run.metric_rows()
    write_json(folder / "summary.json", _summary(run.name, rows, scores))
    write_json(folder / "examples.json", [asdict(one) for one in examples])
    curve_png(rows, folder / "curve.png", run.name)
    return folder


def read_report(run: RunFolder) -> tuple[list[Score], list[Example]]:
    """What ``write_report`` wrote; empty lists where there is none."""
    summary, examples = (read_json(run.path / "report" / name) for name in ("summary.json", "examples.json"))
    scores = summary.get("scores", []) if isinstance(summary, dict) else []
    try:
        return [Score(**row) for row in scores], [Example(**row) for row in examples or []]
    except TypeError:  # another version's
        return [], []


def end_view(rows: Sequence[Mapping[str, Any]], scores: Sequence[Score], examples: Sequence[Example]) -> RenderableType:
    """All of it, to print on a rich console."""
    parts: list[RenderableType] = []
    if curve := curve_text(rows):
        parts += [Text(curve), Text("")]
    if scores:
        parts += [result_table(scores), Text("")]
    if examples:
        parts.append(examples_view(examples))
    return Group(*parts)


def result_table(scores: Sequence[Score]) -> Table:
    """A row a split, a column a stage that was scored."""
    stages: list[Stage] = [stage for stage in STAGES if any(one.stage == stage for one in scores)]
    table = Table(title="greedy accuracy", box=None, pad_edge=False, title_justify="left", header_style="bold")
    table.add_column("questions")
    for stage in stages:
        table.add_column(STAGES[stage], justify="right")
    for split in dict.fromkeys(one.split for one in scores):
        found = {one.stage: one for one in scores if one.split == split}
        count = max(one.questions for one in found.values())
        table.add_row(f"{split} ({count})", *(_share(found.get(stage)) for stage in stages))
    return table


def examples_view(examples: Sequence[Example]) -> RenderableType:
    parts: list[RenderableType] = []
    for one in examples:
        parts.append(Text(f"{one.question}  [{one.db_id}]", style="bold"))
        for label, answer, right in (("before", one.before, one.before_right), ("after", one.after, one.after_right)):
            mark, style = ("right", "green") if right else ("wrong", "red")
            parts.append(Text.assemble(f"  {label:<7}", (f"{mark:<6}", style), _one_line(answer)))
        if not one.after_right:
            parts.append(Text(f"  wanted       {_one_line(one.gold)}"))
    return Group(*parts)


def _summary(name: str, rows: Sequence[Mapping[str, Any]], scores: Sequence[Score]) -> dict[str, Any]:
    reward, validation, seconds = (series(rows, key) for key in (REWARD, VALIDATION, SECONDS))
    trained = [value for step, value in seconds.items() if step > 0]
    return {
        "run": name,
        "step": max((row["step"] for row in rows), default=0),
        "reward_first": next(iter(reward.values()), None),
        "reward_last": next(reversed(reward.values()), None),
        "validation_first": next(iter(validation.values()), None),
        "validation_last": next(reversed(validation.values()), None),
        "validation_best": max(validation.values(), default=None),
        "validation_best_step": max(validation, key=lambda step: (validation[step], step), default=None),
        "seconds_per_step": sum(trained) / len(trained) if trained else None,
        "scores": [asdict(one) for one in scores],
    }


def _share(score: Score | None) -> str:
    return "" if score is None or not score.questions else f"{score.right / score.questions:.3f}"


def _one_line(text: str, limit: int = 400) -> str:
    """A model wrote ``text``: nothing in it may steer a terminal."""
    shown = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return (shown[: limit - 3] + "..." if len(shown) > limit else shown) or "(nothing)"
