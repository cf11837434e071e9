"""The SQL player: a row becomes a SqlTask, the SQL agent plays it, and the rewards of the preset judge it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlight.agents.contract import Endpoint, Episode
from slurmlight.agents.sql import SqlAgent, SqlAgentConfig
from slurmlight.presets import Preset
from slurmlight.presets.schema import AgentSection
from slurmlight.rewards.compose import Composition, compose
from slurmlight.rewards.judged import Judged
from slurmlight.rewards.parts import call_scores
from slurmlight.rewards.sql import Evaluator, execution_match
from slurmlight.runfolder import home
from slurmlight.sql.execute import Limits
from slurmlight.train.rollouts.player import Parts, Score
from slurmlight.train.rollouts.sql_row import from_row


@dataclass(frozen=True)
class Judge:
    """Evaluator and rewards of a preset. ``max_tokens`` bounds a completion, ``timeout_s`` an episode."""

    evaluator: Evaluator
    limits: Limits
    rewards: Composition
    max_tokens: int
    timeout_s: float

    def __call__(self, episode: Episode, gold: str, databases: Sequence[Path]) -> Score:
        """Execution match alone is its own reward; other mixes tell their parts. Raises Unscorable, RewardFailed."""
        verdict = execution_match(gold, episode.answer, databases, self.evaluator, self.limits)
        if self.rewards.plain:
            return Score(float(verdict.score), verdict.kind)
        judged = Judged(episode, gold, verdict, tuple(databases), self.limits, self.max_tokens, self.timeout_s)
        earned = self.rewards(judged)
        return Score(earned.total, verdict.kind, parts=Parts(dict(earned.parts), float(verdict.score), learned(episode)))


class SqlPlayer:
    def __init__(self, agent: SqlAgent, settings: AgentSection, judge: Judge) -> None:
        self.agent = agent
        self.settings = settings
        self.judge = judge

    async def __call__(self, row: Mapping[str, Any], llm: Endpoint) -> Score:
        """Raises InfrastructureError, Unscorable, DatabaseBroken or RewardFailed where there is no episode or no reward."""
        episode = await self.agent.solve(from_row(row, self.settings), llm)
        databases = [Path(path) for path in row["databases"]]
        score = await asyncio.to_thread(self.judge, episode, row["query"], databases)
        return Score(score.reward, score.reason, _detail(episode), score.parts) if row.get("detail") else score


def learned(episode: Episode) -> list[float]:
    """``call_scores`` of the calls that train. The gateway keeps the last of several calls with the same prompt: so do we."""
    turns = list(zip(episode.turns, call_scores(episode), strict=True))
    last = {str(turn.prompt): place for place, (turn, _) in enumerate(turns) if turn.learns}
    return [turns[place][1] for place in sorted(last.values())]


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
    return SqlPlayer(SqlAgent(config), settings, make_judge(preset))


def make_judge(preset: Preset) -> Judge:
    """Raises UserError for a reward file that does not do."""
    return Judge(
        preset.scoring.evaluator,
        Limits(timeout_s=preset.agent.query_timeout_s),
        compose(preset.reward, home()),
        preset.data.max_response_length,
        preset.runner.rollout_timeout_s,
    )
