"""The gateway's process: Agent-Lightning's own server, with what an episode asks of it in fewer and lighter requests.

    AGL_KEY=... python -m slurmlight.train.rollouts.server host=127.0.0.1 'key=${oc.env:AGL_KEY}' default_proxy.model_name=...

App, store, proxy and options (Hydra's grammar) are Agent-Lightning's. Added: claims by the batch, an episode's reward and
end in one request, everything that ended with its events in one. Model calls go out by aiohttp: httpx is 40 % of what a
call costs the server, and with its usual limits no more than 100 calls are under way at a time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import ceil
from typing import Any

import aiohttp
import httpx
import uvicorn
from agentlightning.schemas import DEFAULT_ATTEMPT_ID, EventCreate, RolloutPatch, RolloutState
from agentlightning.server import app as lightning
from agentlightning.server.routes import events, rollouts
from agentlightning.server.store import _rollouts, _terminal_order
from fastapi import APIRouter, Depends, FastAPI, HTTPException
from fastapi.responses import JSONResponse
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from pydantic import BaseModel

UPSTREAM_S = 300.0  # of one model call, as Agent-Lightning has it
KEEP_S = 4.0  # an idle connection; uvicorn, which vLLM listens with, closes it after 5

ASKING_S = 2.0  # a runner that asked so long ago at most wants episodes now: they ask 20 times a second

router = APIRouter(prefix="/api")
_asked: dict[str, float] = {}  # runners that got nothing when they asked last, and when that was (monotonic)


class Claim(BaseModel):
    """Up to ``limit`` queued rollouts for the runner ``name``."""

    name: str
    limit: int


class End(BaseModel):
    """The last events of an episode and how it ended."""

    events: list[EventCreate] = []
    status: dict[str, str]


@router.post("/claims")
async def claim(body: Claim) -> JSONResponse:
    """They are running from now on. No other runner gets them: nothing is awaited between the look and the mark.

    Never more than the runner's share of what is queued, among those that ask: fewer episodes than slots go to all runners.
    """
    now = time.monotonic()
    _asked[body.name] = now
    asking = sum(now - last < ASKING_S for last in _asked.values())
    queued = [one for one in _rollouts.values() if one.status.state == RolloutState.QUEUING]
    taken = queued[: min(body.limit, ceil(len(queued) / asking))]
    if taken:
        del _asked[body.name]  # the rest is shared among the others
    status = {"state": "running", "last_attempt_id": DEFAULT_ATTEMPT_ID, "k8s_job_name": body.name}
    for one in taken:
        await rollouts.patch_rollout(one.rollout_id, RolloutPatch.model_validate({"status": status}))
    return JSONResponse([{"rollout_id": one.rollout_id, "input": one.input, "is_train": one.is_train} for one in taken])


@router.post("/rollouts/{rollout_id}/end")
async def end(rollout_id: str, body: End) -> JSONResponse:
    """404, 409: it was forgotten, or has ended meanwhile; its events are as they were then."""
    found = _rollouts.get(rollout_id)
    if found is not None and found.status.state != RolloutState.RUNNING:
        raise HTTPException(409, f"rollout {rollout_id} is {found.status.state}")
    for event in body.events:
        events.record_event(rollout_id, DEFAULT_ATTEMPT_ID, event.event_type, event.data)
    await rollouts.patch_rollout(rollout_id, RolloutPatch.model_validate({"status": body.status}))
    return JSONResponse({})


@router.get("/ended")
async def ended(after: int = 0) -> JSONResponse:
    """Rollouts that ended since the cursor ``after``, without their input, each with the events that are learned from."""
    items = []
    for rollout_id in _terminal_order[after:]:
        if (one := _rollouts.get(rollout_id)) is None:
            continue
        told = await events.query_events(rollout_id, format="triplet") if one.status.state == RolloutState.SUCCEEDED else []
        rollout = one.model_copy(update={"input": None}).model_dump(mode="json")
        items.append({"rollout": rollout, "events": [event.model_dump(mode="json") for event in told]})
    return JSONResponse({"items": items, "next_after": len(_terminal_order)})


@router.post("/forget")
async def forget(body: list[str]) -> JSONResponse:
    """The server keeps every request and answer in memory, and lists walk over all of them."""
    for rollout_id in body:
        await rollouts.delete_rollout(rollout_id)
    return JSONResponse({})


class Upstream:
    """What Agent-Lightning's proxy asks of its httpx client, by aiohttp, with as many connections as there are calls."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, url: str, *, json: Any, headers: Mapping[str, str]) -> httpx.Response:
        """Raises httpx.TimeoutException and httpx.TransportError."""
        try:
            async with self.session.post(url, data=_encode(json), headers=headers) as answer:
                kind = {"content-type": answer.headers.get("content-type", "")}
                return httpx.Response(answer.status, headers=kind, content=await answer.read())
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.TransportError(str(error)) from error


def _encode(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def make_app(config: DictConfig) -> FastAPI:
    app = lightning.create_app(config)
    app.include_router(router, dependencies=[Depends(lightning._build_auth_dependency(str(config.key)))])
    theirs = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S)
        async with (
            theirs(app),
            aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=UPSTREAM_S)) as session,
        ):
            app.state.http_client = Upstream(session)
            yield

    app.router.lifespan_context = lifespan
    return app


def main() -> None:
    with initialize_config_module("agentlightning.config", version_base=None):
        config = compose("server", overrides=sys.argv[1:])
    uvicorn.run(
        make_app(config),
        host=str(config.host),
        port=int(config.port),
        timeout_keep_alive=120,
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
