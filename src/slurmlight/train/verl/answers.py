"""vLLM's handler of chat calls with token ids from its engine, which become text, JSON and log-probabilities once at the end.

vLLM's own still names the model, sets the sampling's parameters and renders the prompt; what it refuses, it refuses here, too.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import copy
import os
import time
from math import isnan
from types import SimpleNamespace
from typing import Any

import msgspec
from pydantic import PrivateAttr
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.render.serving import OpenAIServingRender
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

MESSAGE = dict.fromkeys(("role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"))
UNFINISHED = "\ufffd"  # at the end of a text: bytes of a character that is not complete
LOWEST = -9999.0  # stands for -inf in an answer
TAIL = 16  # tokens of the prompt that the text of an answer is decoded after
PROMPTS = 1024  # rendered ones that are kept


class Plain(ChatCompletionRequest):
    """A request whose tokens come from the engine as ids."""

    _params: SamplingParams = PrivateAttr()

    def to_sampling_params(self, max_tokens: int, default_sampling_params: dict[str, Any]) -> SamplingParams:
        self._params = super().to_sampling_params(max_tokens, default_sampling_params)
        self._params.detokenize, self._params.flat_logprobs = False, True
        return self._params


class _Render(OpenAIServingRender):
    """The rollouts of a task ask by the same first prompt: it is rendered and tokenized once."""

    kept: dict[bytes, asyncio.Future[Any]]  # by all that a prompt, or its refusal, follows from

    async def render_chat(self, request: ChatCompletionRequest, *, skip_mm_cache: bool = False) -> Any:
        asked = request.__dict__  # to read max_tokens as an attribute is to be warned by pydantic
        limits = asked["max_tokens"], asked["max_completion_tokens"]
        key = msgspec.json.encode((request.messages, request.chat_template_kwargs, limits))
        if key not in self.kept:
            if len(self.kept) >= PROMPTS:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = asyncio.ensure_future(super().render_chat(request, skip_mm_cache=skip_mm_cache))
        found = await asyncio.shield(self.kept[key])  # others may wait for it, too, when this client leaves
        if not isinstance(found, tuple):
            return found
        conversation, prompts = found
        return conversation, [prompt | {"arrival_time": time.time()} for prompt in prompts]


class Chat(OpenAIServingChat):
    """vLLM's handler up to the engine's last output; then JSON."""

    texts: dict[int, tuple[str, list[int]]]  # of a token by itself, and its bytes

    async def chat_completion_full_generator(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: Plain, result_generator: Any, request_id: str, model_name: str, *_: Any, **__: Any
    ) -> dict[str, Any]:
        """The fields of vLLM's answer. Raises ValueError where the engine has none, or an error."""
        created, final = int(time.time()), None
        async for so_far in result_generator:
            final = so_far
        if final is None or final.outputs[0].finish_reason == "error" or isnan(final.outputs[0].cumulative_logprob or 0.0):
            raise ValueError("no answer")
        output, prompt, with_ids = final.outputs[0], final.prompt_token_ids, request.return_token_ids
        choice = {
            "index": 0,
            "message": MESSAGE | {"role": self.response_role, "content": self._text(request, prompt, output)},
            "logprobs": {"content": self._logprobs(output)} if request.logprobs else None,
            "finish_reason": output.finish_reason or "stop",
            "stop_reason": output.stop_reason,
            "token_ids": list(output.token_ids) if with_ids else None,
            "routed_experts": None,
        }
        asked, given = len(prompt), len(output.token_ids)
        return {
            "id": request_id,
            "object": "chat.completion",
            "created": created,
            "model": model_name,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": self.system_fingerprint,
            "usage": {
                "prompt_tokens": asked,
                "total_tokens": asked + given,
                "completion_tokens": given,
                "prompt_tokens_details": None,
            },
            "prompt_logprobs": None,
            "prompt_token_ids": prompt if with_ids else None,
            "prompt_text": None,
            "kv_transfer_params": final.kv_transfer_params,
        }

    def _text(self, request: Plain, prompt: list[int], output: CompletionOutput) -> str:
        """The way it would have come token by token: what is not a character yet stays out at the end."""
        whole: Any = SimpleNamespace(
            request_id=request.request_id, prompt_token_ids=prompt[-TAIL:], sampling_params=request._params
        )
        detokenizer = IncrementalDetokenizer.from_new_request(self.renderer.tokenizer, whole)
        detokenizer.update(list(output.token_ids), output.finish_reason == "stop")
        return detokenizer.get_next_output_text(finished=True, delta=False)

    def _logprobs(self, output: CompletionOutput) -> list[dict[str, Any]]:
        flat: Any = output.logprobs
        ids, tokens = flat.token_ids, []
        for place, (token, value) in enumerate(zip(ids, flat.logprobs, strict=True)):
            text, code = self.texts.get(token) or self._token(token, ids[max(0, place - 4) : place])
            tokens.append({"token": text, "logprob": max(value, LOWEST), "bytes": code, "top_logprobs": []})
        return tokens

    def _token(self, token: int, before: list[int]) -> tuple[str, list[int]]:
        """Kept for the next time, unless it depends on the (up to 4) tokens before it."""
        tokenizer: Any = self.renderer.tokenizer
        text = tokenizer.decode([token]) or ""
        if text.endswith(UNFINISHED):
            text = LogprobsProcessor(tokenizer, None, None, None, None, None)._correct_decoded_token(token, before)
            return text, list(text.encode())
        return self.texts.setdefault(token, (text, list(text.encode(errors="replace"))))


def handler(state: Any) -> Chat | None:
    """None where the server has an option that shows in an answer, or asks more of a request, than is known here."""
    theirs, args, config = state.openai_serving_chat, state.args, state.vllm_config
    special = (
        theirs.parser_cls,
        theirs.request_logger,
        theirs.return_tokens_as_token_ids,
        theirs.enable_prompt_tokens_details,
        args.api_key or os.environ.get("VLLM_API_KEY"),
        args.middleware[1:],
        args.enable_request_id_headers,
        args.enable_server_load_tracking,
        config.model_config.enable_return_routed_experts,
        config.model_config.hf_config.model_type == "gpt_oss",
        config.parallel_config.enable_elastic_ep,
    )
    if any(special):
        return None
    chat = copy.copy(theirs)
    chat.__class__, chat.texts = Chat, {}
    chat.openai_serving_render = copy.copy(theirs.openai_serving_render)
    chat.openai_serving_render.__class__, chat.openai_serving_render.kept = _Render, {}
    return chat
