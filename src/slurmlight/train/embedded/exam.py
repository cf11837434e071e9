"""Greedy scores of a whole split, through the same gateway and agent as training: always plain execution match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurmlight.agents.contract import SqlTask
from slurmlight.tracking.names import VALIDATION
from slurmlight.train.parts import part_metrics
from slurmlight.train.rollouts.play import Job, Playground
from slurmlight.train.rollouts.sql_row import to_row


@dataclass(frozen=True)
class Answered:
    """One question answered greedily."""

    question: str
    db_id: str
    gold: str
    answer: str
    right: bool


@dataclass(frozen=True)
class Exam:
    """``questions`` is how many were scored: what infrastructure lost (``failed``) counts neither as right nor as wrong.

    ``parts`` are metrics of a composed reward, under their names in validation.
    """

    right: float
    questions: int
    failed: int
    answers: tuple[Answered, ...]
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """Of a validation."""
        mean = self.right / max(1, self.questions)
        return {VALIDATION: mean, "val/n_rollouts": self.questions, "val/n_failed_rollouts": self.failed} | self.parts


def examine(playground: Playground, tasks: Sequence[SqlTask], name: str, progress: Callable[[int], None]) -> Exam:
    """``name`` tells this exam's episodes from all others of the attempt. Raises what Playground.play raises."""
    jobs = [Job(f"{name}-{index}", to_row(task) | {"detail": True}, learns=False) for index, task in enumerate(tasks)]
    played = playground.play(jobs, progress)
    scored = [(task, one) for task, one in zip(tasks, played, strict=True) if one.reward is not None]
    answers = tuple(
        Answered(task.question, task.db_id, task.gold, str(one.detail.get("answer", "")), (one.reward or 0.0) >= 1.0)
        for task, one in scored
    )
    right = sum(one.reward or 0.0 for _, one in scored)
    return Exam(
        right, len(scored), len(played) - len(scored), answers, part_metrics([one.parts for one in played if one.parts], "val")
    )
