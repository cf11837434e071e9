"""The policy server: the tiny policy behind the OpenAI chat API, on one CPU thread.

    python -m slurmlight.train.embedded.policy_server --model DIR --port P

Serves /v1/chat/completions (with token ids and log-probabilities in vLLM's form), /v1/models and /health. POST
/control/load {"folder": DIR} takes new weights; it asks for the key in SLURMLIGHT_POLICY_KEY and is absent without one.
A request's tokens depend on its messages, seed, temperature and the weights alone, not on what else is served.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from jinja2.exceptions import TemplateError

from slurmlight.errors import UserError
from slurmlight.train.embedded import batcher
from slurmlight.train.embedded.batcher import Batcher, Completion
from slurmlight.train.embedded.decoder import Decoder, load_weights, read_shape
from slurmlight.train.embedded.tokens import ChatTokens

KEY_NAME = "SLURMLIGHT_POLICY_KEY"
DEFAULT_PLACES = 32


class Message(TypedDict):
    role: str
    content: str


class ChatBody(msgspec.Struct):
    """What a chat completion request may ask for. Other fields of the OpenAI API are ignored, as vLLM ignores unknown ones."""

    messages: list[Message]
    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    n: int = 1
    stream: bool = False
    top_p: float | None = None
    stop: Any = None
    chat_template_kwargs: dict[str, Any] = {}


class BadRequest(Exception):
    """The request cannot be served; the text goes to the client with status 400."""


class Policy:
    """A model folder being served: its tokenizer and its batcher."""

    def __init__(self, folder: Path, places: int = DEFAULT_PLACES, max_length: int | None = None) -> None:
        """Raises UserError where ``folder`` holds no model this server can decode."""
        self.folder = folder
        self.version = 0
        self.shape = read_shape(folder)
        self.max_length = min(max_length or self.shape.max_positions, self.shape.max_positions)
        self.tokens = ChatTokens(folder)
        decoder = Decoder(self.shape, load_weights(folder, self.shape), self.max_length)
        self.batcher = Batcher(decoder, places, self.tokens.end_tokens)

    def load(self, folder: Path, version: int) -> None:
        self.batcher.replace(load_weights(folder, self.shape))
        self.version = version

    def request(self, body: ChatBody) -> batcher.Request:
        """Raises BadRequest for what this server cannot do, and for a prompt that leaves no room for a completion."""
        if body.stream or body.n != 1 or body.stop or body.top_p not in (None, 1.0):
            raise BadRequest("this server knows neither stream, n > 1, stop nor top_p")
        if body.temperature < 0:
            raise BadRequest(f"temperature {body.temperature} is negative")
        try:
            prompt = self.tokens.encode(body.messages, body.chat_template_kwargs)
        except (TemplateError, TypeError, ValueError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}") from None
        room = self.max_length - len(prompt)
        asked = body.max_completion_tokens or body.max_tokens or room
        if not prompt or asked < 1 or asked > room:
            raise BadRequest(
                f"this model's maximum context length is {self.max_length} tokens, "
                f"the messages take {len(prompt)} and {asked} were asked for"
            )
        seed = secrets.randbits(31) if body.seed is None else body.seed
        return batcher.Request(prompt, asked, body.temperature, seed)

    def answer(self, body: ChatBody, request: batcher.Request, done: Completion) -> dict[str, Any]:
        """A chat.completion object; token ids and log-probabilities in the places where vLLM puts them."""
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": self.tokens.decode(done.tokens)},
            "finish_reason": done.finish_reason,
            "logprobs": {"content": self._logprobs(done)} if body.logprobs else None,
        }
        prompt, completion = len(request.prompt), len(done.tokens)
        answer = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(self.folder),
            "choices": [choice],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        }
        if body.return_token_ids:
            choice["token_ids"] = done.tokens
            answer["prompt_token_ids"] = request.prompt
        return answer

    def _logprobs(self, done: Completion) -> list[dict[str, Any]]:
        return [
            {"token": self.tokens.name(token), "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(done.tokens, done.logprobs, strict=True)
        ]


def create_app(policy: Policy, key: str = "") -> FastAPI:
    """The HTTP side. ``key`` "" leaves the control calls out."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(policy.batcher.run())
        task.add_done_callback(_end_process_on_error)
        yield
        task.cancel()

    app = FastAPI(title="slurmlight policy server", lifespan=lifespan)
    decoder = msgspec.json.Decoder(ChatBody)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        spent = policy.batcher.cpu_seconds
        return {"status": "ok", "pid": os.getpid(), "version": policy.version, "generation_cpu_seconds": spent}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": str(policy.folder), "object": "model", "owned_by": "slurmlight"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> JSONResponse:
        try:
            body = decoder.decode(await request.body())
            asked = policy.request(body)
        except (msgspec.MsgspecError, BadRequest) as error:
            return _error(400, str(error))
        try:
            return JSONResponse(policy.answer(body, asked, await policy.batcher.generate(asked)))
        except batcher.Replaced:
            return _error(503, "the weights were replaced while this was generated")

    if key:

        @app.post("/control/load")
        async def load(request: Request) -> JSONResponse:
            if not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {key}"):
                return _error(401, "wrong key")
            asked = await request.json()
            try:
                policy.load(Path(asked["folder"]), int(asked["version"]))
            except UserError as error:
                return _error(400, str(error))
            return JSONResponse({"version": policy.version})

    return app


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status_code=status)


def _end_process_on_error(task: asyncio.Task[None]) -> None:
    """A server whose batcher died would keep every client waiting for ever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        import traceback

        traceback.print_exception(error)
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="The tiny policy behind the OpenAI chat API.")
    parser.add_argument("--model", type=Path, required=True, help="folder of a saved Qwen3 model with its tokenizer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--places", type=int, default=DEFAULT_PLACES, help="rows of a decoding step, per length class")
    parser.add_argument("--max-length", type=int, help="tokens of prompt and completion; default: the model's")
    asked = parser.parse_args()
    try:
        app = create_app(Policy(asked.model, asked.places, asked.max_length), os.environ.pop(KEY_NAME, ""))
    except UserError as error:
        raise SystemExit(f"policy server: {error}") from None
    uvicorn.run(app, host=asked.host, port=asked.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
