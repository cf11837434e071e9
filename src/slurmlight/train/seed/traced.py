"""The chat client of a seed runner. AgentOps copies token ids from typed calls only; ``agents.chat`` posts plain ones."""

from __future__ import annotations

import json
from typing import Any

import openai

_TYPED = ("model", "messages", "temperature", "max_tokens", "seed")  # parameters of chat.completions.create


class TracedClient(openai.AsyncOpenAI):
    """Turns the plain POST of ``agents.chat.complete`` into the typed call that AgentOps has wrapped."""

    async def post(self, path: str, *, cast_to: Any, body: Any = None, options: Any = None, **more: Any) -> Any:
        if cast_to is not str:  # the typed call's own request
            return await super().post(path, cast_to=cast_to, body=body, options=options or {}, **more)
        known = {name: body[name] for name in _TYPED if name in body}
        other = {name: value for name, value in body.items() if name not in known}
        timeout = (options or {}).get("timeout")
        answer = await self.chat.completions.create(**known, extra_body=other, timeout=timeout)
        return json.dumps(answer.to_dict())
