"""The learning curve of a run: as text for a terminal and as a PNG. Input is ``RunFolder.metric_rows()``."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmlight.files import write_atomic
from slurmlight.tracking.names import REWARD, VALIDATION, series

Rows = Sequence[Mapping[str, Any]]

# Bit of each of a braille cell's 2 x 4 dots, [row][column] (Unicode 16, block Braille Patterns): narrow in every terminal.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_AXIS = 6  # characters left of the plot


def curve_text(rows: Rows, width: int = 72, height: int = 12) -> str:
    """The curve in ``width`` x ``height`` + 3 characters: reward as a line, validation as x. "" without two points."""
    reward, validation = series(rows, REWARD), series(rows, VALIDATION)
    points = {**reward, **validation}
    if len(points) < 2 or width < _AXIS + 12 or height < 2:
        return ""
    low, high = _range([*reward.values(), *validation.values()])
    first, last = min(points), max(points)
    columns = width - _AXIS - 2
    cells = [[0] * columns for _ in range(height)]

    def place(step: int, value: float) -> tuple[int, int]:
        across = (step - first) / max(last - first, 1)
        return round(across * (columns * 2 - 1)), round((high - value) / (high - low) * (height * 4 - 1))

    _draw_line(cells, [place(step, value) for step, value in sorted(reward.items())])
    canvas = [[chr(0x2800 + cell) if cell else " " for cell in row] for row in cells]
    for step, value in validation.items():
        x, y = place(step, value)
        canvas[y // 4][x // 2] = "x"
    lines = []
    for index, row in enumerate(canvas):
        marked = index in (0, height // 2, height - 1)
        value = high - (high - low) * (index / (height - 1))
        lines.append((f"{value:{_AXIS}.2f}" if marked else " " * _AXIS) + " |" + "".join(row).rstrip())
    ends = f"{first}{f'step {last}':>{max(columns - len(str(first)), 0)}}"
    lines.append(" " * _AXIS + " +" + "-" * columns)
    lines.append(" " * (_AXIS + 2) + ends)
    lines.append(" " * (_AXIS + 2) + "\u2824\u2824 reward (sampled)   x validation (greedy)")
    return "\n".join(lines)


def curve_png(rows: Rows, path: Path, title: str = "") -> None:
    """Write the curve as a PNG, atomically. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    reward, validation = series(rows, REWARD), series(rows, VALIDATION)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if reward:
        axes.plot(list(reward), list(reward.values()), color="C0", alpha=0.35, label="reward (sampled)")
        smooth = _smoothed(list(reward.values()))
        axes.plot(list(reward), smooth, color="C0", label="reward, mean of 5 steps")
    if validation:
        axes.plot(list(validation), list(validation.values()), "o-", color="C1", label="validation (greedy)")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    if title:
        axes.set_title(title)
    if reward or validation:
        axes.legend(loc="best")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomic(path, picture.getvalue())


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the axis on tenths, at least a tenth apart."""
    low, high = math.floor(min(values) * 10) / 10, math.ceil(max(values) * 10) / 10
    return low, max(high, low + 0.1)


def _draw_line(cells: list[list[int]], points: Sequence[tuple[int, int]]) -> None:
    for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for k in range(steps + 1):
            x, y = round(x0 + (x1 - x0) * k / steps), round(y0 + (y1 - y0) * k / steps)
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]


def _smoothed(values: Sequence[float], window: int = 5) -> list[float]:
    """Mean of each value and up to ``window`` - 1 before it."""
    return [sum(part := values[max(0, i - window + 1) : i + 1]) / len(part) for i in range(len(values))]
