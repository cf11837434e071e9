"""The heartbeat watchdog: tells a hang from work, and adds up where the seconds went."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurmlight.runfolder import Status

NO_FIRST_STEP = "no first step"
NO_HEARTBEAT = "no heartbeat"
ASLEEP_S = 30.0  # between two looks, which are a second apart


@dataclass
class Watchdog:
    """Judges one attempt by its heartbeats. Times are seconds of a monotonic clock, read by the caller.

    Until the attempt's first row of metrics ``first_step_s`` counts from ``started`` (loading a model may take long); later a
    beat must come every ``step_s``. A beat counts when its content changes, by this clock: the payload's may be wrong.
    """

    attempt: int
    first_step_s: float
    step_s: float
    started: float
    phases: dict[str, float] = field(default_factory=dict)
    _seen: Status | None = None
    stepped: bool = False
    _beat: float = 0.0
    looked: float = 0.0

    def __post_init__(self) -> None:
        self.looked = self.started

    def look(self, status: Status | None, metrics_grew: bool, now: float) -> str:
        """Take in the newest heartbeat; returns what is wrong, or an empty string."""
        self._account(now)
        if status is not None and status.attempt == self.attempt and status != self._seen:
            self._seen, self._beat = status, now
        self.stepped = self.stepped or metrics_grew
        if not self.stepped:
            return NO_FIRST_STEP if now - self.started > self.first_step_s else ""
        return NO_HEARTBEAT if now - max(self._beat, self.started) > self.step_s else ""

    def _account(self, now: float) -> None:
        phase = self._seen.phase if self._seen else "start"
        gap = now - self.looked
        if gap > ASLEEP_S:  # this process was stopped too (a suspended job): that time is nobody's fault
            self.started += gap
            self._beat += gap
        self.phases[phase] = self.phases.get(phase, 0.0) + gap
        self.looked = now
