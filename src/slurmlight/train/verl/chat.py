"""A quick way through vLLM's HTTP server for what agents ask of it: plain text in, one answer with its log-probabilities out.

On an H200 the server's one Python process needed 9 ms of CPU for a call of a 135M model, and the GPU waited for it three
quarters of the rollouts' time. Much of that went into the text of each token as it came, which nobody reads before the end,
the rest into middlewares, typed objects around each log-probability and the same prompt tokenized for every rollout of a
task (make bench-chat). What is not plain goes to vLLM as it came, and so does what fails: every refusal is vLLM's own.
vLLM loads ``Quick`` as a middleware (``--middleware``).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slurmlight.train.verl.answers import Chat, Plain, handler

PATH = "/v1/chat/completions"
SAMPLING = {"temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens"}
FIELDS = SAMPLING | {"model", "messages", "logprobs", "return_token_ids", "chat_template_kwargs"}
ROLES = ("system", "user", "assistant")
# With any other, vLLM or one of its middlewares might answer in another way.
HEADERS = {b"host", b"connection", b"user-agent", b"accept", b"accept-encoding", b"content-type", b"content-length"}

_faults: set[type] = set()  # that were told


class Quick:
    """ASGI middleware of vLLM's server."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.chat: Chat | None = None  # once the server's state is there and says that it can be

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        heard = [await receive()]
        while heard[-1].get("more_body"):
            heard.append(await receive())
        self.chat = self.chat or handler(scope["app"].state)
        body = _plain(scope["headers"], b"".join(part.get("body", b"") for part in heard))
        if self.chat is None or body is None:
            return await self.app(scope, _again(heard, receive), send)
        work, gone = asyncio.ensure_future(_answer(self.chat, body)), asyncio.ensure_future(receive())
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():  # the client left: the engine need not go on
            work.cancel()
            return None
        gone.cancel()
        if (answer := work.result()) is None:
            return await self.app(scope, _again(heard, receive), send)
        return await Response(msgspec.json.encode(answer), media_type="application/json")(scope, receive, send)


def _plain(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> dict[str, Any] | None:
    told = dict(headers)
    if not (told.keys() <= HEADERS and told.get(b"content-type") == b"application/json"):
        return None
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    if not (isinstance(asked, dict) and asked.keys() <= FIELDS and isinstance(asked.get("messages"), list)):
        return None
    return asked if all(_is_text(message) for message in asked["messages"]) else None


def _is_text(message: Any) -> bool:
    plain = isinstance(message, dict) and message.keys() == {"role", "content"}
    return plain and isinstance(message["content"], str) and message["role"] in ROLES


async def _answer(chat: Chat, body: dict[str, Any]) -> dict[str, Any] | None:
    """None where there is none: vLLM is asked again then, which answers by its own refusal, or by a 500 where it is broken."""
    try:
        found: Any = await chat.create_chat_completion(Plain.model_validate(body))
    except Exception as error:
        if not isinstance(error, ValueError) and type(error) not in _faults:  # no refusal: another vLLM than this was made for?
            _faults.add(type(error))
            print(f"no quick answer, vLLM's own handler is asked ({error!r})", flush=True)
        return None
    return found if isinstance(found, dict) else None


def _again(heard: Iterable[Message], receive: Receive) -> Receive:
    """What was heard of a request, and then what is still to come."""
    left = deque(heard)

    async def hear() -> Message:
        return left.popleft() if left else await receive()

    return hear
