"""The policy server's API: vLLM's form of token ids and log-probabilities, clear refusals, weights by a control call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient

from slurmlight.train.embedded.actor import load_model
from slurmlight.train.embedded.policy_server import Policy, create_app
from slurmlight.train.embedded.tokens import ChatTokens
from tests.trainbed import write_model

MESSAGES = [{"role": "user", "content": "How many cats are red?"}]
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TestClient]:
    with TestClient(create_app(Policy(folder, places=8, max_length=96), "secret")) as client:
        yield client


def ask(server: TestClient, **more: object) -> dict:
    body = {"model": "any", "messages": MESSAGES, "max_tokens": 6, "seed": 3, "temperature": 1.0} | more
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_ids_and_logprobs_are_where_agent_lightning_looks_for_them(server: TestClient, folder: Path) -> None:
    from agentlightning.server.routes.events import _trim_model_request

    answer = ask(server, logprobs=True, return_token_ids=True)
    seen = _trim_model_request({"response": answer})
    assert seen["prompt_token_ids"] == ChatTokens(folder).encode(MESSAGES, {})
    assert len(seen["response_token_ids"]) == len(seen["response_log_probs"]) == answer["usage"]["completion_tokens"]
    ids = torch.tensor([seen["prompt_token_ids"] + seen["response_token_ids"]])
    with torch.no_grad():
        logits = load_model(folder).eval()(ids).logits[0, len(seen["prompt_token_ids"]) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(seen["response_token_ids"])[:, None])[:, 0]
    assert seen["response_log_probs"] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_seed_gives_the_same_answer_again_and_another_seed_another(server: TestClient) -> None:
    first, again, other = (ask(server, seed=seed, return_token_ids=True)["choices"][0]["token_ids"] for seed in (3, 3, 4))
    assert first == again != other


def test_token_ids_and_logprobs_come_only_where_they_are_asked_for(server: TestClient) -> None:
    answer = ask(server)
    assert "prompt_token_ids" not in answer
    assert answer["choices"][0]["logprobs"] is None


def test_the_openai_client_understands_the_answers(server: TestClient) -> None:
    import openai

    client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=server, max_retries=0)
    done = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=4, seed=1, logprobs=True)  # type: ignore[arg-type]
    assert done.choices[0].logprobs is not None
    assert len(done.choices[0].logprobs.content or []) == done.usage.completion_tokens  # type: ignore[union-attr]
    assert client.models.list().data[0].id


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": MESSAGES, "stream": True}, "stream"),
        ({"messages": MESSAGES, "n": 2}, "n > 1"),
        ({"messages": MESSAGES, "temperature": -1}, "negative"),
        ({"messages": [{"role": "user", "content": "cats " * 200}]}, "maximum context length is 96"),
        ({"messages": MESSAGES, "max_tokens": 96}, "maximum context length is 96"),
        ({"messages": "hello"}, "messages"),
        ({}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 7}]}, "content"),
    ],
)
def test_a_request_it_cannot_serve_gets_400_and_the_reason(server: TestClient, body: dict, says: str) -> None:
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_no_json_gets_400(server: TestClient) -> None:
    assert server.post("/v1/chat/completions", content=b"{").status_code == 400


def test_weights_are_replaced_only_with_the_key_and_only_by_whole_ones(
    server: TestClient, folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    before = ask(server, return_token_ids=True)["choices"][0]["token_ids"]
    weights = {
        name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    body = {"folder": str(tmp_path), "version": 1}
    assert server.post("/control/load", json=body).status_code == 401
    assert server.post("/control/load", json=body | {"folder": "/nowhere"}, headers=KEY).status_code == 400
    assert ask(server, return_token_ids=True)["choices"][0]["token_ids"] == before
    assert server.post("/control/load", json=body, headers=KEY).json() == {"version": 1}
    assert server.get("/health").json()["version"] == 1
    assert ask(server, return_token_ids=True)["choices"][0]["token_ids"] != before
    assert server.post("/control/load", json={"folder": str(folder), "version": 2}, headers=KEY).status_code == 200
    assert ask(server, return_token_ids=True)["choices"][0]["token_ids"] == before


def test_without_a_key_there_is_no_control(folder: Path) -> None:
    with TestClient(create_app(Policy(folder))) as client:
        assert client.post("/control/load", json={}).status_code == 404
