"""A SQL task as the input of a rollout, and back. Apart from the player: trainers need no agent and no graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmlight.agents.contract import SqlTask
from slurmlight.presets.schema import AgentSection


def to_row(task: SqlTask) -> dict[str, Any]:
    """``task`` as JSON values (an engine may add ``seed``, and ``detail`` to hear the answer too)."""
    return {
        "task_id": task.task_id,
        "question": task.question,
        "db_id": task.db_id,
        "query": task.gold,
        "databases": [str(task.database), *task.extra.get("instances", [])],
    }


def from_row(row: Mapping[str, Any], settings: AgentSection) -> SqlTask:
    """The task without its gold query, which the agent has no business with."""
    return SqlTask(
        task_id=row["task_id"],
        question=row["question"],
        db_id=row["db_id"],
        database=Path(row["databases"][0]),
        max_turns=settings.max_turns,
        query_timeout_s=settings.query_timeout_s,
    )
