"""What the gateway's server adds to Agent-Lightning's: claims, ends and collections in one request, calls without a ceiling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.instant_policy import app as instant_policy
from slurmlight.train.rollouts.children import free_port
from slurmlight.train.rollouts.gateway import Gateway
from tests.trainbed import serving

AT_ONCE = 150  # httpx, Agent-Lightning's own client, has 100 connections at most


class Together:
    """A model server that answers nobody before ``AT_ONCE`` calls are there."""

    def __init__(self) -> None:
        self.calls, self.all_here = 0, asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.calls += 1
        if self.calls == AT_ONCE:
            self.all_here.set()
        await self.all_here.wait()
        await instant_policy(scope, receive, send)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway"), "some/model", 1.0) as running:
        yield running


def ask(gateway: Gateway, method: str, path: str, body: Any = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {gateway.key}"}
    return httpx.request(method, f"{gateway.url}{path}", json=body, headers=headers, timeout=60, trust_env=False)


def enqueue(gateway: Gateway, *names: str) -> None:
    gateway.api.enqueue([{"rollout_id": name, "input": {"question": name}, "is_train": True} for name in names])


def claim(gateway: Gateway, runner: str, limit: int) -> list[str]:
    return [one["rollout_id"] for one in ask(gateway, "POST", "/api/claims", {"name": runner, "limit": limit}).json()]


def claim_all(gateway: Gateway) -> None:
    while claim(gateway, "one", 9):
        pass


def reward(value: float) -> dict[str, Any]:
    return {"event_type": "reward", "data": {"value": value}}


def test_two_runners_never_get_the_same_episode(gateway: Gateway) -> None:
    enqueue(gateway, "a", "b", "c")
    first, second = claim(gateway, "one", 2), claim(gateway, "two", 2)
    assert (first, second) == (["a", "b"], ["c"])
    owners = {one["rollout_id"]: one["status"]["k8s_job_name"] for one in gateway.api.running()}
    assert {name: owners[name] for name in "abc"} == {"a": "one", "b": "one", "c": "two"}


def test_runners_that_ask_share_what_is_queued(gateway: Gateway) -> None:
    for runner in ("three", "four", "five"):
        assert claim(gateway, runner, 9) == []
    enqueue(gateway, *(f"s{number}" for number in range(6)))
    counts = [len(claim(gateway, runner, 9)) for runner in ("three", "four", "five")]
    assert max(counts) <= 2, "others that asked lately keep their share"
    claim_all(gateway)
    assert claim(gateway, "three", 9) == []


def test_an_end_brings_reward_and_state_and_a_second_one_changes_nothing(gateway: Gateway) -> None:
    _, before = gateway.api.ended(0)
    enqueue(gateway, "d", "e")
    claim_all(gateway)
    end = {"events": [reward(1.0)], "status": {"state": "succeeded"}}
    assert ask(gateway, "POST", "/api/rollouts/d/end", end).status_code == 200
    assert ask(gateway, "POST", "/api/rollouts/d/end", end | {"events": [reward(0.0)]}).status_code == 409
    assert gateway.api.fail("e", "its runner died")
    assert ask(gateway, "POST", "/api/rollouts/e/end", end).status_code == 409
    ended, cursor = gateway.api.ended(before)
    assert [(one.name, one.error) for one in ended] == [("d", ""), ("e", "its runner died")]
    assert [[event["data"]["value"] for event in one.events] for one in ended] == [[1.0], []]
    assert gateway.api.ended(cursor) == ([], cursor)
    gateway.api.forget(["d", "e"])
    assert gateway.api.ended(before) == ([], cursor)
    assert ask(gateway, "POST", "/api/rollouts/d/end", end).status_code == 404


def test_a_reward_that_is_no_number_does_not_hold_up_the_others(gateway: Gateway) -> None:
    _, before = gateway.api.ended(0)
    enqueue(gateway, "f", "g")
    claim_all(gateway)
    for name, text in (("f", "NaN"), ("g", "0.5")):
        body = f'{{"events": [{{"event_type": "reward", "data": {{"value": {text}}}}}], "status": {{"state": "succeeded"}}}}'
        headers = {"Authorization": f"Bearer {gateway.key}", "Content-Type": "application/json"}
        url = f"{gateway.url}/api/rollouts/{name}/end"
        httpx.post(url, content=body, headers=headers, trust_env=False).raise_for_status()
    ended, _ = gateway.api.ended(before)
    assert [one.events[0]["data"]["value"] for one in ended] == [None, 0.5]


def test_strangers_are_refused(gateway: Gateway) -> None:
    for method, path in (
        ("POST", "/api/claims"),
        ("GET", "/api/ended"),
        ("POST", "/api/forget"),
        ("POST", "/api/rollouts/a/end"),
    ):
        assert httpx.request(method, f"{gateway.url}{path}", json={}, trust_env=False).status_code == 401


def test_as_many_model_calls_as_episodes_are_under_way_at_once(tmp_path: Path) -> None:
    with serving(Together()) as policy, Gateway(tmp_path, "some/model", 1.0) as gateway:
        gateway.api.register_model("some/model", policy)
        enqueue(gateway, "many")
        url = f"{gateway.url}/proxy/rollout/many/attempt/0/mode/train/openai/v1/chat/completions"

        async def call_all() -> list[int]:
            limits = httpx.Limits(max_connections=None)
            headers = {"Authorization": f"Bearer {gateway.key}"}
            async with httpx.AsyncClient(limits=limits, headers=headers, timeout=120, trust_env=False) as client:
                body = {"messages": [{"role": "user", "content": "hi"}]}
                return [
                    answer.status_code
                    for answer in await asyncio.gather(*(client.post(url, json=body) for _ in range(AT_ONCE)))
                ]

        assert asyncio.run(call_all()) == [200] * AT_ONCE


def test_a_model_server_that_is_gone_is_told_to_the_agent(tmp_path: Path) -> None:
    with Gateway(tmp_path, "some/model", 1.0) as gateway:
        gateway.api.register_model("some/model", f"http://127.0.0.1:{free_port()}/v1")
        enqueue(gateway, "alone")
        path = "/proxy/rollout/alone/attempt/0/mode/train/openai/v1/chat/completions"
        answer = ask(gateway, "POST", path, {"messages": []})
    assert answer.status_code == 502 and "request failed" in answer.text
