"""Signs that a policy is being ruined, read from the rows of metrics, the same in every engine: what is seen, and why, likely.

A metric that an engine does not write raises no alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from slurmlight.presets.learning import StabilitySection
from slurmlight.tracking.names import REWARD, STEP, number

FIRST = 3  # steps whose mean stands for the start of training
WINDOW = 5  # steps of a reward mean
PHASE = "curriculum/phase"
ALARMS = "training/alarms"
NOT_A_NUMBER = "training/not_a_number"  # updates left out because a gradient was no number

type Row = Mapping[str, Any]


@dataclass(frozen=True)
class Alarm:
    """``since`` is the first step that showed it: a checkpoint before that step is good."""

    name: str
    step: int
    since: int
    seen: str
    cause: str

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: {self.seen}; likely {self.cause}"


def look(rows: Sequence[Row], steady: StabilitySection) -> list[Alarm]:
    """The alarms of the last of ``rows`` (training steps in order, the last one just done)."""
    rows = [row for row in rows if row[STEP] > 0]
    if not rows:
        return []
    checks = (_not_a_number, _kl, _entropy, _reward, _length, _groups)
    return [alarm for check in checks if (alarm := check(rows, steady)) is not None]


def _not_a_number(rows: Sequence[Row], _: StabilitySection) -> Alarm | None:
    row = rows[-1]
    bad = [name for name in ("actor/pg_loss", "actor/grad_norm") if name in row and not isfinite(row[name])]
    if not bad and not row.get(NOT_A_NUMBER):
        return None
    seen = f"{' and '.join(bad) or 'a gradient'} is no number; that update was left out"
    return Alarm(
        "not a number", row[STEP], row[STEP], seen, "a learning rate far too high, or a broken reward or log-probability"
    )


def _kl(rows: Sequence[Row], steady: StabilitySection) -> Alarm | None:
    row = rows[-1]
    found = {name: value for name in ("actor/ppo_kl", "actor/kl_loss") if (value := number(row, name)) is not None}
    name, value = max(found.items(), key=lambda item: abs(item[1]), default=("", 0.0))
    if not steady.kl_ceiling or abs(value) <= steady.kl_ceiling:
        return None
    cause = (
        "a learning rate too high for the batch (lower it, or take fewer mini batches and epochs)"
        if name == "actor/ppo_kl"
        else "a policy running away from its reference (raise actor.kl_loss_coef, for instance 0.1 to 0.3, or set a target_kl)"
    )
    return Alarm("KL blow-up", row[STEP], row[STEP], f"{name} {value:.3g} above {steady.kl_ceiling:g}", cause)


def _entropy(rows: Sequence[Row], steady: StabilitySection) -> Alarm | None:
    start = _start(rows, "actor/entropy")
    if start is None or not steady.entropy_floor:
        return None
    floor = steady.entropy_floor * start
    cause = "a learning rate too high, or nothing that keeps exploring (raise entropy_coeff or rollout.temperature)"
    return _lasting("entropy collapse", rows, steady, "actor/entropy", lambda value: value < floor, f"below {floor:.3g}", cause)


def _reward(rows: Sequence[Row], steady: StabilitySection) -> Alarm | None:
    rows = [row for row in rows if row.get(PHASE) == rows[-1].get(PHASE)]  # harder tasks are no collapse
    rewards = [value for row in rows if (value := number(row, REWARD)) is not None]
    means = [sum(rewards[at : at + WINDOW]) / WINDOW for at in range(len(rewards) - WINDOW + 1)]
    first = sum(rewards[:FIRST]) / FIRST if len(rewards) >= FIRST else rewards[0] if rewards else 0.0
    floor = steady.reward_floor * max([first, *means, 0.0])
    cause = "an update that ruined the policy: a learning rate too high, or a reward part that pays for something else"
    return _lasting("reward collapse", rows, steady, REWARD, lambda value: value < floor, f"below {floor:.3g}", cause)


def _length(rows: Sequence[Row], steady: StabilitySection) -> Alarm | None:
    start = _start(rows, "response_length/mean")
    if start is None or not steady.length_ceiling:
        return None
    ceiling = steady.length_ceiling * start
    cause = "completions that no longer end: a reward that pays for length, or a policy that forgot how to stop"
    said = f"above {ceiling:.0f}"
    return _lasting("length explosion", rows, steady, "response_length/mean", lambda value: value > ceiling, said, cause)


def _groups(rows: Sequence[Row], steady: StabilitySection) -> Alarm | None:
    if not steady.zero_groups:
        return None

    def uniform(row: Row) -> bool:
        groups, equal = number(row, "training/n_groups"), number(row, "training/n_zero_adv_groups")
        return bool(groups) and equal is not None and equal >= steady.zero_groups * groups

    since = _since(rows, uniform, steady.patience)
    if since is None:
        return None
    reward = number(rows[-1], REWARD) or 0.0
    cause = (
        "tasks far too hard, or answers that the reward cannot read" if reward < 0.5 else "tasks that are all solved already"
    )
    seen = f"{steady.zero_groups:.0%} or more of the groups have equal rewards (mean {reward:.2f}): nothing to learn"
    return Alarm("all-zero groups", rows[-1][STEP], since, seen, f"{cause} (see curriculum, sampling.prefer_mixed, rollout.n)")


def _lasting(
    name: str, rows: Sequence[Row], steady: StabilitySection, metric: str, bad: Any, limit: str, cause: str
) -> Alarm | None:
    """An alarm where ``bad`` holds for ``metric`` in the last ``patience`` rows."""
    since = _since(rows, lambda row: (value := number(row, metric)) is not None and bad(value), steady.patience)
    if since is None:
        return None
    return Alarm(
        name, rows[-1][STEP], since, f"{metric} {number(rows[-1], metric):.3g} {limit} for {steady.patience} steps", cause
    )


def _since(rows: Sequence[Row], bad: Any, patience: int) -> int | None:
    """The first step of the unbroken run of bad rows at the end, where it is at least ``patience`` long."""
    run = 0
    while run < len(rows) and bad(rows[-1 - run]):
        run += 1
    return rows[-run][STEP] if run >= patience else None


def _start(rows: Sequence[Row], metric: str) -> float | None:
    """The metric's mean over the first steps; None until there are that many besides the last row."""
    values = [value for row in rows[:FIRST] if (value := number(row, metric)) is not None]
    return sum(values) / len(values) if len(rows) > FIRST and values else None
