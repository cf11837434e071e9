"""The SQL player: a row becomes a SqlTask, the SQL agent plays it, execution match on every instance is its reward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmlight.agents.contract import Endpoint, Episode, SqlTask
from slurmlight.agents.sql import SqlAgent, SqlAgentConfig
from slurmlight.presets import Preset
from slurmlight.presets.schema import AgentSection
from slurmlight.rewards.sql import execution_match
from slurmlight.train.rollouts.player import Score


def to_row(task: SqlTask) -> dict[str, Any]:
    """``task`` as JSON values: the input of a rollout (engines may add a ``seed``, and ``detail`` to hear more than a reward)."""
    return {
        "task_id": task.task_id,
        "question": task.question,
        "db_id": task.db_id,
        "query": task.gold,
        "databases": [str(task.database), *task.extra.get("instances", [])],
    }


class SqlPlayer:
    def __init__(self, agent: SqlAgent, settings: AgentSection, evaluator: str) -> None:
        self.agent = agent
        self.settings = settings
        self.evaluator = evaluator

    async def __call__(self, row: Mapping[str, Any], llm: Endpoint) -> Score:
        """Raises InfrastructureError, DatabaseMissing or DatabaseBroken where the episode could not be played or judged."""
        databases = [Path(path) for path in row["databases"]]
        task = SqlTask(
            task_id=row["task_id"],
            question=row["question"],
            db_id=row["db_id"],
            database=databases[0],
            max_turns=self.settings.max_turns,
            query_timeout_s=self.settings.query_timeout_s,
        )
        episode = await self.agent.solve(task, llm)
        verdict = await asyncio.to_thread(execution_match, row["query"], episode.answer, databases, self.evaluator)
        return Score(float(verdict.match), verdict.reason, _detail(episode) if row.get("detail") else {})


def _detail(episode: Episode) -> dict[str, Any]:
    return {
        "answer": episode.answer,
        "turns": [{"node": turn.node, "sql": turn.sql, "outcome": turn.outcome} for turn in episode.turns],
    }


def make(preset: Preset) -> SqlPlayer:
    settings = preset.agent
    config = SqlAgentConfig(
        check=settings.check,
        learn=settings.learn,
        prompt=settings.prompt,
        max_prompt_tokens=preset.data.max_prompt_length,
    )
    return SqlPlayer(SqlAgent(config), settings, preset.reward.evaluator)
