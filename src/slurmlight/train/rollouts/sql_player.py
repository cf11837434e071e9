"""The SQL player: a row becomes a SqlTask, the SQL agent plays it, execution match on every instance is its reward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmlight.agents.contract import Endpoint, Episode
from slurmlight.agents.sql import SqlAgent, SqlAgentConfig
from slurmlight.presets import Preset
from slurmlight.presets.schema import AgentSection
from slurmlight.rewards.sql import Evaluator, execution_match
from slurmlight.sql.execute import Limits
from slurmlight.train.rollouts.player import Score
from slurmlight.train.rollouts.sql_row import from_row


class SqlPlayer:
    def __init__(self, agent: SqlAgent, settings: AgentSection, evaluator: Evaluator) -> None:
        self.agent = agent
        self.settings = settings
        self.evaluator: Evaluator = evaluator
        self.limits = Limits(timeout_s=settings.query_timeout_s)

    async def __call__(self, row: Mapping[str, Any], llm: Endpoint) -> Score:
        """Raises InfrastructureError, Unscorable or DatabaseBroken where the episode could not be played or judged."""
        episode = await self.agent.solve(from_row(row, self.settings), llm)
        databases = [Path(path) for path in row["databases"]]
        verdict = await asyncio.to_thread(execution_match, row["query"], episode.answer, databases, self.evaluator, self.limits)
        return Score(float(verdict.score), verdict.kind, _detail(episode) if row.get("detail") else {})


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
