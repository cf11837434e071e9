"""Which tasks a step trains on: all of them in a seeded order, or by the phases of a curriculum and by what they may teach.

Everything follows from the run's seed and from a small state that is part of the checkpoint, so a resumed run draws on as if
nothing had happened.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurmlight.agents.contract import SqlTask
from slurmlight.data.adversarial import variant
from slurmlight.data.difficulty import by_hardness, by_solve_rate, mixedness
from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.presets.learning import Phase
from slurmlight.train.alarms import PHASE
from slurmlight.train.embedded.order import DataOrder, episode_seed
from slurmlight.train.rollouts.play import Job, Played
from slurmlight.train.rollouts.sql_row import to_row

type Drawn = list[tuple[int, SqlTask]]  # a task's place in the training file, and the task or a variant of it


def jobs_of(drawn: Drawn, n: int, seed: int, step: int, name: str) -> list[Job]:
    """``n`` episodes of every task, task after task; ``name`` tells this step's from all others of the attempt."""
    return [
        Job(f"{name}-{place}-{sample}", to_row(task) | {"seed": episode_seed(seed, step, index, sample)}, learns=True)
        for place, (index, task) in enumerate(drawn)
        for sample in range(n)
    ]


@dataclass
class State:
    """``phase`` counts from 0 (-1: none began), ``before`` is the step before its first, ``chosen`` are its tasks."""

    phase: int = -1
    before: int = 0
    chosen: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)  # episodes of each task
    solved: list[float] = field(default_factory=list)  # of these, with the right answer


class Course:
    def __init__(self, tasks: Sequence[SqlTask], preset: Preset, folder: Path) -> None:
        """``folder`` gets the databases of adversarial variants. Raises UserError for too few tasks, in all or in a phase."""
        self.tasks, self.folder = tasks, folder
        self.seed, self.batch = preset.engine.seed, preset.data.train_batch_size
        self.sampling = preset.sampling
        self.order = DataOrder(len(tasks), self.batch, self.seed)
        self.phases = preset.curriculum or ((Phase(),) if preset.sampling.prefer_mixed else ())
        self.difficulty = [by_hardness(task.gold) for task in tasks] if self.phases else []
        self.restart()
        if self.sampling.difficulty == "hardness":
            for number in range(len(self.phases)):
                self._refuse_empty(number)

    def restart(self) -> None:
        """The state before the first step."""
        size = len(self.tasks) if self.phases else 0
        self.state = State(tried=[0] * size, solved=[0.0] * size)

    def draw(self, step: int) -> Drawn:
        """The tasks of ``step``, each once. Call it for each step in turn. Raises OSError where a variant cannot be written."""
        if not self.phases:
            return [(index, self.tasks[index]) for index in self.order.tasks(step)]
        self._enter(step)
        drawn = self._mixed(step) if self.sampling.prefer_mixed else self._shuffled(step)
        if not self.phases[self.state.phase].adversarial:
            return [(index, self.tasks[index]) for index in drawn]
        return [(index, variant(self.tasks[index], self.folder, self.seed)) for index in drawn]

    def note(self, drawn: Drawn, played: Sequence[Played]) -> None:
        """How the episodes of ``drawn`` ended, equally many of each task, task after task; failed ones count for nothing."""
        if not self.phases:
            return
        each = len(played) // len(drawn)
        for place, one in enumerate(played):
            if one.reward is not None:
                index = drawn[place // each][0]
                self.state.tried[index] += 1
                self.state.solved[index] += one.parts.get("plain", one.reward) >= 1.0

    def metrics(self) -> dict[str, float]:
        if not self.phases:
            return {}
        return {PHASE: self.state.phase + 1, "curriculum/tasks": len(self.state.chosen)}

    def kept(self, step: int) -> dict[str, Any]:
        """The state after ``step`` as a checkpoint holds it."""
        course = asdict(self.state) if self.phases else {}
        return {"epoch": self.order.epoch(step), "size": self.order.size, "course": course}

    def take_up(self, kept: dict[str, Any]) -> None:
        """Go on from ``kept``; a checkpoint of a run without phases has none."""
        if self.phases and kept:
            self.state = State(**kept)

    def _enter(self, step: int) -> None:
        """Begin every phase that is due."""
        state = self.state
        while state.phase < 0 or (state.phase + 1 < len(self.phases) and step > state.before + self._length()):
            state.before = step - 1 if state.phase < 0 else state.before + self._length()
            state.phase += 1
            state.chosen = self._tasks_of(state.phase)

    def _length(self) -> int:
        phase = self.phases[self.state.phase]
        return phase.steps or phase.rounds * self._steps_a_round()

    def _steps_a_round(self) -> int:
        return max(1, len(self.state.chosen) // self.batch)

    def _tasks_of(self, number: int) -> list[int]:
        """Those up to the phase's ceiling; by solve rate at least a batch of the easiest."""
        if self.sampling.difficulty == "hardness":
            difficulty = self.difficulty
        else:
            measured = zip(self.difficulty, self.state.tried, self.state.solved, strict=True)
            difficulty = [by_solve_rate(*one) for one in measured]
        ceiling = self.phases[number].difficulty
        found = [index for index, value in enumerate(difficulty) if value <= ceiling]
        if self.sampling.difficulty == "solve_rate" and len(found) < self.batch:
            found = sorted(sorted(range(len(difficulty)), key=lambda index: (difficulty[index], index))[: self.batch])
        return found

    def _shuffled(self, step: int) -> list[int]:
        """A seeded shuffle a round, cut into whole batches."""
        round_, place = divmod(step - self.state.before - 1, self._steps_a_round())
        chosen = list(self.state.chosen)
        random.Random(f"{self.seed}/phase {self.state.phase} round {round_}").shuffle(chosen)
        return chosen[place * self.batch : (place + 1) * self.batch]

    def _mixed(self, step: int) -> list[int]:
        """A batch without repeats, weighted by ``mixedness``: the largest of u^(1/w) (Efraimidis and Spirakis 2006)."""
        rng, state = random.Random(f"{self.seed}/mixed {step}"), self.state
        keys = {index: rng.random() ** (1 / mixedness(state.tried[index], state.solved[index])) for index in state.chosen}
        return sorted(state.chosen, key=lambda index: (-keys[index], index))[: self.batch]

    def _refuse_empty(self, number: int) -> None:
        found, ceiling = len(self._tasks_of(number)), self.phases[number].difficulty
        if found < self.batch:
            raise UserError(
                f"curriculum phase {number + 1} has {found} tasks up to difficulty {ceiling:g}, fewer than "
                f"data.train_batch_size={self.batch}",
                "raise its difficulty or lower the batch size",
            )
