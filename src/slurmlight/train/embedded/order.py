"""Which tasks a step trains on and which seeds its episodes sample with: functions of the run's seed and the step alone."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from slurmlight.errors import UserError


@dataclass(frozen=True)
class DataOrder:
    """Every epoch is a seeded shuffle of ``size`` tasks, cut into whole batches; a rest is left out, as in verl."""

    size: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < self.batch:
            raise UserError(
                f"the training file has {self.size} rows, fewer than data.train_batch_size={self.batch}", "lower the batch size"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.batch

    def epoch(self, step: int) -> int:
        """The pass, from 0, that ``step`` (from 1) belongs to."""
        return (step - 1) // self.steps_per_epoch

    def tasks(self, step: int) -> list[int]:
        """Indices of the tasks of ``step``."""
        order = list(range(self.size))
        random.Random(f"{self.seed}/epoch {self.epoch(step)}").shuffle(order)
        start = (step - 1) % self.steps_per_epoch * self.batch
        return order[start : start + self.batch]


def episode_seed(seed: int, step: int, task: int, sample: int) -> int:
    """The sampling seed of an episode, below 2**31; its calls derive theirs by ``call_seed``."""
    digest = hashlib.blake2b(f"{seed}/{step}/{task}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % 2**31
