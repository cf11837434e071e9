"""An OpenAI server that answers at once, always the same, with token ids:  python bench/instant_policy.py PORT"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import uvicorn

TOKENS, PROMPT = 13, 60  # as many as the tiny policy's answers and prompts have
ANSWER = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 0,
    "model": "instant",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "SELECT nothing FROM nowhere"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * TOKENS},
            "token_ids": list(range(TOKENS)),
        }
    ],
    "usage": {"prompt_tokens": PROMPT, "completion_tokens": TOKENS, "total_tokens": PROMPT + TOKENS},
}


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Prompt ids differ from call to call, as real ones do: the gateway keeps one call per prompt."""
    if scope["type"] != "http":
        return
    message, body = await receive(), b""
    while message["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
        message = await receive()
    ids = [*hashlib.sha256(body).digest()[:8], *range(PROMPT - 8)]
    answer = json.dumps(ANSWER | {"prompt_token_ids": ids}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False, lifespan="off")
