"""The one agent contract: ``async def solve(task, llm) -> Episode``, the same in training, evaluation and by hand.

An agent sees a task and an Endpoint. Changing ``Endpoint.learn.base_url`` is all it takes to move it from the embedded
policy server to the Agent-Lightning gateway, to vLLM or to a commercial API.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class InfrastructureError(Exception):
    """The episode could not be played (no model, no database, gateway gone): never a wrong answer, no reward of 0."""


class PromptTooLong(InfrastructureError):
    """The model's context has no room for this prompt."""


@dataclass(frozen=True)
class Channel:
    """Where chat completions are asked for: an OpenAI-compatible ``base_url`` (ends in /v1), its key, the model's name.

    ``template_kwargs``: whether it takes ``chat_template_kwargs``, vLLM's way to turn thinking off. Some refuse every field
    that OpenAI does not know.
    """

    base_url: str
    api_key: str
    model: str
    template_kwargs: bool = True


@dataclass(frozen=True)
class Sampling:
    """How to sample. ``seed`` is the episode's; a call uses ``call_seed(seed, turn)``. None leaves it to the server."""

    temperature: float = 1.0
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Endpoint:
    """What an agent may call: ``learn`` for the calls that train the policy, ``aux`` for those that do not.

    Agent-Lightning 1.0 tells the two apart by URL. Where nothing learns (evaluation) both are the same channel.
    """

    learn: Channel
    aux: Channel
    sampling: Sampling = Sampling()
    timeout_s: float = 120.0


@dataclass(frozen=True)
class SqlTask:
    """One question on one database. ``gold`` is for the reward only: an agent must not look at it."""

    task_id: str
    question: str
    db_id: str
    database: Path
    gold: str = ""
    max_turns: int = 3
    query_timeout_s: float = 5.0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One model call: its place in the graph (write, check, rewrite), whether it learns, what came out of it."""

    node: str
    learns: bool
    prompt: list[dict[str, str]]
    completion: str
    sql: str = ""
    outcome: str = ""  # what executing ``sql`` gave: rows, empty, error, timeout, too_large, refused; "" where not executed
    message: str = ""  # the error's or refusal's text, as the model was told
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Episode:
    """What the agent did: the final answer plus what rewards and reports need."""

    task: SqlTask
    answer: str
    turns: tuple[Turn, ...] = ()
    seconds: float = 0.0


def call_seed(seed: int | None, turn: int) -> int | None:
    """The sampling seed of the ``turn``-th call (from 0) of an episode; below 2**31 as OpenAI servers expect."""
    return None if seed is None else (seed * 1_000_003 + turn * 7919 + 1) % 2**31
