"""What keeps training steady in the embedded engine: rewards on one scale, and a look at every step's row for alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.tracking.names import STEP
from slurmlight.train.alarms import Alarm, look
from slurmlight.train.rollouts.play import Played
from slurmlight.train.stability import Moments, scaled

MEND = (
    "slurmlight report shows the curve; launch with stability.on_alarm=fallback to go back by itself, =warn to go on as it is, "
    "or start anew with a smaller learning rate"
)


class Ruined(UserError):
    """Training was stopped by an alarm: a person decides, no requeue."""


class Steady:
    def __init__(self, preset: Preset) -> None:
        self.settings, self.scoring = preset.stability, preset.scoring
        self.moments = Moments()
        self.go_back([], 0)

    def go_back(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Training goes on from ``step``; ``rows`` are those of the run so far, some of them perhaps of later steps."""
        self.rows = [row for row in rows if 0 < row[STEP] <= step]
        self.alarms = look(self.rows, self.settings)

    def refuse(self, step: int) -> None:
        """Raises Ruined where the run was stopped by an alarm at ``step`` and nobody has decided anything since."""
        if self.alarms and self.settings.on_alarm == "stop":
            raise Ruined(f"stopped by an alarm: {self.alarms[0]}; step {step} is saved", MEND)

    def rescale(self, played: Sequence[Played]) -> Sequence[Played]:
        """The episodes with the rewards that training uses."""
        if not (self.scoring.normalize or self.scoring.clip):
            return played
        rewards = [one.reward for one in played if one.reward is not None]
        self.moments = self.moments.with_batch(rewards)
        values = iter(scaled(rewards, self.moments, self.scoring))
        return [one if one.reward is None else replace(one, reward=next(values)) for one in played]

    def look(self, row: Mapping[str, Any]) -> list[Alarm]:
        """The alarms of the step whose row this is that the step before did not raise already."""
        self.rows.append(row)
        known = {alarm.name for alarm in self.alarms}
        self.alarms = look(self.rows, self.settings)
        return [alarm for alarm in self.alarms if alarm.name not in known]

    def kept(self) -> dict[str, Any]:
        """The state as a checkpoint holds it; the rows are in metrics.jsonl."""
        return asdict(self.moments)

    def take_up(self, kept: Mapping[str, Any]) -> None:
        self.moments = Moments(**kept)
