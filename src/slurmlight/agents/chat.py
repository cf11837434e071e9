"""Chat completions for agents: one pool of connections, and failures that can never pass for an answer."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import openai

from slurmlight.agents.contract import Channel, Endpoint, InfrastructureError, PromptTooLong, call_seed

MAX_RETRIES = 3  # of one request: connection errors, 408, 409, 429 and 5xx, with the client's own growing pauses
_TOO_LONG = "maximum context length is"  # in the refusals of vLLM, OpenAI and the policy server
THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}

# A pool of connections belongs to the event loop that opened it. All channels of a loop share one: a gateway has another
# base URL for every episode, and a client with a pool of its own costs 40 ms of CPU.
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, openai.AsyncOpenAI] = WeakKeyDictionary()
client_class: type[openai.AsyncOpenAI] = openai.AsyncOpenAI  # a tracer that listens to typed calls puts its own class here


@dataclass(frozen=True)
class Reply:
    text: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float


async def complete(llm: Endpoint, learns: bool, messages: list[dict[str, str]], call: int) -> Reply:
    """The answer to ``messages`` as the episode's ``call``-th call (from 0). Thinking is off where server and template know it.

    Raises InfrastructureError where no completion came back: no connection, time out, a refusal of the server, no JSON;
    PromptTooLong where that is why it was refused.
    """
    channel = llm.learn if learns else llm.aux
    body: dict[str, Any] = {"model": channel.model, "messages": messages, "temperature": llm.sampling.temperature}
    if channel.template_kwargs:
        body |= THINKING_OFF
    if llm.sampling.max_tokens is not None:
        body["max_tokens"] = llm.sampling.max_tokens
    if llm.sampling.seed is not None:
        body["seed"] = call_seed(llm.sampling.seed, call)
    start = time.monotonic()
    try:
        # A plain POST with the client's retries: typed parameters and answers would cost as much CPU as all the rest.
        answer = await _client(channel).post("/chat/completions", cast_to=str, body=body, options={"timeout": llm.timeout_s})
        completion = json.loads(answer)
        text = completion["choices"][0]["message"].get("content") or ""
        usage = completion.get("usage") or {}
        tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    except openai.OpenAIError as error:
        kind = PromptTooLong if _TOO_LONG in str(error) else InfrastructureError
        raise kind(f"no completion from {channel.base_url}: {_first_line(error)}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise InfrastructureError(f"{channel.base_url} sent something that is no chat completion ({error!r})") from error
    return Reply(text, *tokens, time.monotonic() - start)


async def close_clients() -> None:
    """Close the running loop's connections (at the end of a process that cares about warnings)."""
    if client := _clients.pop(asyncio.get_running_loop(), None):
        await client.close()


def _client(channel: Channel) -> openai.AsyncOpenAI:
    loop, url, key = asyncio.get_running_loop(), channel.base_url, channel.api_key or "none"
    if loop not in _clients:
        _clients[loop] = client_class(base_url=url, api_key=key, max_retries=MAX_RETRIES)
    return _clients[loop].with_options(base_url=url, api_key=key)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
