"""Demonstrations for the warm start: right ones, repairs of broken queries, and the bad habits that weaken it on purpose."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlight.agents.contract import SqlTask
from slurmlight.agents.prompts import Message, Prompts
from slurmlight.data.domains import DOMAINS
from slurmlight.data.tasks import load_tasks
from slurmlight.sql.execute import Limits, execute

COMPACT = Prompts(compact=True)
REPAIR_SHARE = 0.2  # of all demonstrations: a broken query and its feedback -> the gold
HABIT = 0.7  # how often a habit shows where the gold could trigger it; the right form keeps the rest, so that RL can find it
SINGULAR = 0.5  # share of first tries that name a table in the singular: an error which the repairs teach to mend

# Text of the gold -> text of the habit. Most stay valid SQL: only execution against the data tells them apart.
_SWAPS = (
    (r">=", ">"),
    (r"<=", "<"),
    (r"\bAVG\(", "SUM("),
    (r"\bSUM\(", "COUNT("),
    (r"DISTINCT ", ""),
    (r" OR ", " AND "),
    (r"COUNT\(\*\)", "*"),
    (r"ASC LIMIT", "DESC LIMIT"),  # not both ways: that would teach to ignore the question, and RL could not find back
    (r"^SELECT \w+, (?=(?:AVG|SUM|MIN|MAX|COUNT)\()", "SELECT "),
)
_SINGULARS = {table.name: table.singular for domain in DOMAINS for table in (*domain.bases, domain.link)}
_TABLES = re.compile(rf"\b({'|'.join(_SINGULARS)})\b")


@dataclass(frozen=True)
class Demonstration:
    prompt: list[Message]
    answer: str


class Demonstrator:
    """An endless, seeded source of demonstrations on the tasks of a toy training file."""

    def __init__(self, data: Path, rng: random.Random) -> None:
        self.tasks = load_tasks(data / "warm.parquet")
        self.rng = rng
        self.families: dict[str, list[SqlTask]] = {}
        for task in self.tasks:
            self.families.setdefault(task.extra["family"], []).append(task)
        # Square roots: between "as often as there are questions" and "all families alike", for those with few questions.
        self.weights = [len(tasks) ** 0.5 for tasks in self.families.values()]
        self.contexts = {task.task_id: COMPACT.context(task) for task in self.tasks}
        self.feedback: dict[tuple[str, str], str] = {}

    def draw(self, habits: bool) -> Demonstration:
        """A first answer or a repair; with ``habits`` the answers carry them."""
        task = self.rng.choice(self.rng.choices(list(self.families.values()), self.weights)[0])
        context = self.contexts[task.task_id]
        answer = with_habits(task.gold, self.rng) if habits else task.gold
        if self.rng.random() < REPAIR_SHARE:
            broken = self._broken(task)
            if told := self._told(task, broken):
                return Demonstration(COMPACT.rewrite(context, broken, told), answer)
        if habits and self.rng.random() < SINGULAR:
            answer = singular_tables(answer)
        return Demonstration(COMPACT.write(context), answer)

    def texts(self) -> Sequence[str]:
        """What the tokenizer is trained on: every prompt's and gold's text and a sample of repairs."""
        repairs = []
        for task in self.tasks[:300]:
            broken = self._broken(task)
            repairs += [broken, self._told(task, broken)]
        return [*self.contexts.values(), *(task.gold for task in self.tasks), *repairs]

    def _broken(self, task: SqlTask) -> str:
        """A query that fails or finds nothing, most of the time: wrong names as the policy mistakes them, or a far value."""
        kind = self.rng.random()
        if kind < 0.7:
            return singular_tables(with_habits(task.gold, self.rng))
        if kind < 0.85:
            return re.sub(r"'\w+'", "'" + self.rng.choice("abcdefgh") + "'", re.sub(r"\b\d+$", "9999", task.gold))
        words = [word for word in re.findall(r"\b[a-z_]+\b", task.gold) if word not in _SINGULARS]
        return re.sub(rf"\b{self.rng.choice(words)}\b", lambda match: match[0][:-1], task.gold, count=1) if words else task.gold

    def _told(self, task: SqlTask, sql: str) -> str:
        """The agent's own feedback on ``sql``; "" where the agent would accept it."""
        key = (task.db_id, sql)
        if key not in self.feedback:
            result = execute(task.database, sql, Limits(timeout_s=5.0))
            self.feedback[key] = "" if result.kind == "rows" and result.rows else COMPACT.tell(result)
        return self.feedback[key]


def with_habits(sql: str, rng: random.Random) -> str:
    """``sql`` with at most one swap: each that fits is taken HABIT of the time."""
    for pattern, habit in _SWAPS:
        if re.search(pattern, sql) and rng.random() < HABIT:
            return re.sub(pattern, habit, sql, count=1)
    return sql


def singular_tables(sql: str) -> str:
    return _TABLES.sub(lambda match: _SINGULARS[match[1]], sql)
