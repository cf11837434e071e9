"""vLLM's own HTTP server with the quick way through it: the same answers, and vLLM's own where it does not apply."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.vllm_server import OWN, serving
from tests.trainbed import QUESTIONS

pytestmark = pytest.mark.stack
pytest.importorskip("verl", reason="verl is not installed (requirements-stack.lock)")

OPTIONS = "--max-model-len=256 --max-num-seqs=8 --no-enable-prefix-caching"
ASKED = {"model": "policy", "messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 24}
LEARNS = ASKED | {"logprobs": True, "return_token_ids": True, "temperature": 1.0}


class Server:
    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def metric(self, pattern: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(pattern, line))

    def own(self) -> float:
        """Requests that vLLM's own middlewares have seen."""
        return self.metric(r'http_requests_total\{handler="/v1/chat/completions"')

    def ask(self, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
        content = body if isinstance(body, str) else json.dumps(body)
        answer = self.client.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"} | headers
        )
        if answer.headers["content-type"] != "application/json":
            return answer.status_code, re.sub(r'"(id|created)":[^,]*,', "", answer.text)
        told = answer.json()
        return answer.status_code, {name: value for name, value in told.items() if name not in ("id", "created")}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    from slurmlight.train.embedded import tinymodel

    with tempfile.TemporaryDirectory(prefix="sl-") as folder:
        scratch = Path(folder)
        tokenizer = tinymodel.build_tokenizer(QUESTIONS)
        model = tinymodel.build_model(tokenizer, seed=0)
        assert model.generation_config is not None
        model.generation_config.eos_token_id = [*range(2, len(tokenizer), 16)]  # answers of 16 tokens, more or less
        tinymodel.save(scratch / "model", model, tokenizer)
        once = httpx.Limits(max_keepalive_connections=0)  # vLLM closes those that it answered by a 500
        with (
            serving(scratch, scratch / "model", OPTIONS) as (url, _),
            httpx.Client(base_url=url, timeout=60, trust_env=False, limits=once) as client,
        ):
            yield Server(client)


def close(quick: Any, own: Any) -> None:
    """Equal but for the last digits of log-probabilities."""
    for one, other in zip(_values(quick), _values(own), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert quick == own


def _values(answer: Any) -> list[float]:
    told = answer["choices"][0]["logprobs"]
    return [token.pop("logprob") for token in told["content"]] if told else []


@pytest.mark.parametrize(
    "body",
    [
        ASKED | {"temperature": 0.0},
        LEARNS | {"temperature": 0.0},
        LEARNS | {"seed": 1, "chat_template_kwargs": {"enable_thinking": False}},
        LEARNS | {"seed": 2, "top_p": 0.9, "top_k": 50},
        LEARNS | {"seed": 3, "max_tokens": None, "max_completion_tokens": 3},
        {name: value for name, value in LEARNS.items() if name != "max_tokens"} | {"seed": 4},
        ASKED
        | {"messages": [{"role": role, "content": "¿ été 😀?"} for role in ("system", "user", "assistant", "user")], "seed": 5},
    ],
)
def test_a_plain_request_gets_the_answer_of_vllm_itself(server: Server, body: dict[str, Any]) -> None:
    before = server.own()
    status, quick = server.ask(body, {})
    assert server.own() == before, "it took vLLM's own way"
    assert status == 200
    own = server.ask(body, OWN)
    assert server.own() == before + 1
    assert own[0] == 200
    close(quick, own[1])


def test_seeded_answers_of_every_end_and_of_torn_characters(server: Server) -> None:
    ends, torn = set(), 0
    for seed in range(40):
        _, quick = server.ask(LEARNS | {"seed": seed}, {})
        ends.add((quick["choices"][0]["finish_reason"], quick["choices"][0]["stop_reason"] is None))
        torn += "\ufffd" in quick["choices"][0]["message"]["content"]
        close(quick, server.ask(LEARNS | {"seed": seed}, OWN)[1])
    assert {end for end, _ in ends} == {"stop", "length"}
    assert torn


REFUSED = [
    ASKED | {"messages": [{"role": "user", "content": "cats " * 600}]},
    ASKED | {"model": "another"},
    ASKED | {"temperature": -1.0},
    ASKED | {"max_tokens": 0},
    ASKED | {"max_tokens": "many"},
    ASKED | {"messages": "hello"},
    ASKED | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto"},
    ASKED | {"chat_template_kwargs": {"chat_template": "mine"}},
    "{",
    "[]",
]
OTHER = [
    LEARNS | {"seed": 1, "stream": True},
    LEARNS | {"seed": 1, "top_logprobs": 2},
    LEARNS | {"seed": 1, "n": 2},
    LEARNS | {"seed": 1, "stop": ["a"]},
    LEARNS | {"seed": 1, "messages": [{"role": "nobody", "content": "hello"}]},
    ASKED | {"temperature": 0.0, "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
]


@pytest.mark.parametrize("body", REFUSED + OTHER)
def test_what_is_not_plain_or_not_right_gets_the_answer_of_vllm_itself(server: Server, body: Any) -> None:
    before = server.own()
    status, answer = server.ask(body, {})
    assert server.own() == before + 1
    assert (status >= 400) == any(body is one for one in REFUSED)
    if status >= 400:  # of a completion it is enough to know whose it is: two of one seed may differ, as their batches do
        assert (status, answer) == server.ask(body, OWN)


def test_the_engine_stops_where_the_client_has_left(server: Server) -> None:
    tokens = "vllm:generation_tokens_total"
    long = ASKED | {"max_tokens": 200, "temperature": 0.0}
    assert server.ask(long, {})[1]["usage"]["completion_tokens"] == 200
    before = server.metric(tokens)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/chat/completions", json=long, timeout=0.1)
    made = [before]
    while len(made) < 3 or made[-1] > made[-2]:
        time.sleep(0.5)
        made.append(server.metric(tokens))
    assert made[-1] - before < 200
