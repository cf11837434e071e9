"""Progress for people: a bar in a terminal, one plain line a step in a log. The payload and whoever follows it use both."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from slurmlight.tracking.names import REWARD, SECONDS, STEP, VALIDATION, number

_WINDOW = 20  # steps whose mean gives seconds a step: long enough to hold a validation, short enough to follow a change


class StepProgress:
    """Shows rows of metrics (names.py) as they come. ``total`` is the last step, ``done`` the step a resume starts from."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.total = total
        self.done = done
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._last: dict[str, float] = {}
        self._bar = _bar(self.console) if self.console.is_terminal else None
        self._task = self._bar.add_task("", total=total, completed=done, shown="") if self._bar else None

    def __enter__(self) -> StepProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def seconds_per_step(self) -> float | None:
        return sum(self._seconds) / len(self._seconds) if self._seconds else None

    @property
    def eta(self) -> float | None:
        """Seconds until the last step at the present pace; None until a step was timed."""
        pace = self.seconds_per_step
        return None if pace is None else pace * max(self.total - self.done, 0)

    def show(self, row: Mapping[str, Any]) -> None:
        self.done = int(row.get(STEP, self.done))
        for name in (REWARD, VALIDATION):
            if (value := number(row, name)) is not None:
                self._last[name] = value
        if self.done and (seconds := number(row, SECONDS)) is not None:
            self._seconds.append(seconds)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, shown=self._words(self._last))
            return
        fresh = {name: value for name in (REWARD, VALIDATION) if (value := number(row, name)) is not None}
        extra = "".join(
            f"  {label} {value:.4g}"
            for label, name in (("loss", "actor/pg_loss"), ("grad", "actor/grad_norm"))
            if (value := number(row, name)) is not None
        )
        self.say(f"step {self.done}/{self.total}  {self._words(fresh)}{extra}".rstrip())

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        console = self._bar.console if self._bar else self.console
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _words(self, values: Mapping[str, float]) -> str:
        words = [f"{label} {values[name]:.3f}" for label, name in (("reward", REWARD), ("val", VALIDATION)) if name in values]
        if (pace := self.seconds_per_step) is not None and self.eta is not None:
            words += [f"{pace:.2f} s/step", f"ETA {clock(self.eta)}"]
        return "  ".join(words)


def clock(seconds: float) -> str:
    """Seconds as H:MM:SS, with days in front where there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d " * bool(days) + f"{hour}:{minute:02d}:{second:02d}"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[shown]}", markup=False),
        console=console,
        expand=True,
    )
