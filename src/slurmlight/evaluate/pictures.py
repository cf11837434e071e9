"""The report's pictures as PNG bytes: accuracy by hardness, turns, training curve."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmlight.evaluate.summary import EVALUATORS
from slurmlight.runfolder import RunFolder
from slurmlight.sql.hardness import LEVELS
from slurmlight.tracking.curve import curve_png

COLOURS = {"strict": "#1f77b4", "official": "#ff7f0e"}


def by_hardness(summary: Mapping[str, Any]) -> bytes:
    """Bars of both evaluators for each level and for all, with 95 % intervals and numbers of questions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.8), layout="constrained")
    axes = figure.add_subplot()
    main = "accuracy" if summary["greedy"] else f"mean@{summary['samples']}"
    for place, evaluator in enumerate(EVALUATORS):
        found = summary["evaluators"][evaluator]
        rates = [*(found["by_hardness"][level] for level in LEVELS), found]
        heights = [one[main] or 0.0 for one in rates]
        low = [max(0.0, height - one["low"]) if one["questions"] else 0.0 for height, one in zip(heights, rates, strict=True)]
        high = [max(0.0, one["high"] - height) if one["questions"] else 0.0 for height, one in zip(heights, rates, strict=True)]
        where = [at + (place - 0.5) * 0.38 for at in range(len(rates))]
        axes.bar(where, heights, 0.36, label=evaluator, color=COLOURS[evaluator], yerr=[low, high], capsize=3, ecolor="#444")
        if place == 0:
            names = [f"{name}\n{one['questions']}" for name, one in zip([*LEVELS, "all"], rates, strict=True)]
            axes.set_xticks(range(len(rates)), names)
    axes.set_ylim(0, 1)
    axes.set_ylabel(summary["measure"])
    axes.set_xlabel("hardness, number of questions")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return _png(figure)


def turns(summary: Mapping[str, Any]) -> bytes:
    """Episodes by queries written, right ones below wrong ones (strict)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.8), layout="constrained")
    axes = figure.add_subplot()
    names: Sequence[str] = list(summary["turns"])
    right = [summary["turns"][name]["right"] for name in names]
    wrong = [summary["turns"][name]["wrong"] for name in names]
    axes.bar(names, right, 0.6, label="right (strict)", color="#2ca02c")
    axes.bar(names, wrong, 0.6, bottom=right, label="wrong", color="#d62728")
    axes.set_xlim(-0.8, max(len(names), 3) - 0.2)
    axes.set_xlabel("queries written")
    axes.set_ylabel("episodes")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return _png(figure)


def training_curve(run: str, scratch: Path) -> bytes | None:
    """The run's own curve; None where there is no run or no row. Raises OSError."""
    rows = RunFolder(run).metric_rows() if run else []
    if not rows:
        return None
    path = scratch / "curve.png"
    curve_png(rows, path, f"training of {Path(run).name}")
    return path.read_bytes()


def _png(figure: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
