"""Agent-Lightning 1.0's own server as gateway: started, watched and asked over HTTP, the same for every engine.

Every model call of an episode passes through it; it keeps prompt ids, token ids and log-probabilities as the model server
gave them. All its state is in memory: it lives for one attempt.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from slurmlight.errors import UserError
from slurmlight.train.rollouts.children import Child, ChildEnded, free_port

KEY_NAME = "AGL_KEY"
_START_S = 60.0
_DYING_S = 5.0  # after a broken connection: how long to wait for the server's end, to name it rather than the connection
_TRIES = 3  # a free port may be taken between the look and the bind


class Gateway:
    """``with Gateway(...) as gateway``: the server (server.py) running on the loopback interface, with a random key.

    ``model`` is the name the upstream model server is asked for. Agents' own temperatures are overridden by the server:
    ``train_temperature`` in mode/train, 0 in mode/val.
    """

    def __init__(self, logs: Path, model: str, train_temperature: float, port: int | None = None) -> None:
        self.key = secrets.token_hex(16)
        self.asked_port = port
        self._logs = logs
        self._options = [
            "host=127.0.0.1",
            f"key=${{oc.env:{KEY_NAME}}}",  # resolved inside the server: the key is in no command line
            f"default_proxy.model_name={_hydra_text(model)}",
            f"default_proxy.train.temperature={train_temperature}",
            "default_proxy.val.temperature=0.0",
        ]

    def __enter__(self) -> Gateway:
        """Raises UserError where the asked port is taken, ChildEnded where the server does not come up."""
        for attempt in range(_TRIES):
            self.port = self.asked_port or free_port()
            self.child = self._start()
            try:
                self._wait_until_healthy()
                break
            except ChildEnded as error:
                self.child.stop()
                taken = "address already in use" in str(error)
                if taken and self.asked_port:
                    raise UserError(
                        f"port {self.port} is taken, the gateway cannot listen on it", "free it, or leave the port to be chosen"
                    ) from None
                if not taken or attempt == _TRIES - 1:
                    raise
        self.url = f"http://127.0.0.1:{self.port}"
        self.api = GatewayApi(self.url, self.key)
        return self

    def __exit__(self, *_: object) -> None:
        self.api.close()
        self.child.stop()

    def check(self, patience_s: float = 0.0) -> None:
        """Raises ChildEnded where the server is gone (or goes within ``patience_s``): with it go all episodes under way."""
        if self.child.ends_within(patience_s):
            raise ChildEnded(f"the {self.child.ending()}; start the run again, it resumes from its last checkpoint")

    def gone(self, error: httpx.HTTPError) -> ChildEnded:
        """What to raise where ``error`` ended a call: the server's end, which a broken connection may be ahead of."""
        try:
            self.check(_DYING_S)
        except ChildEnded as ended:
            return ended
        return ChildEnded(f"the gateway does not answer ({error}); see {self.child.log}")

    def _start(self) -> Child:
        command = [sys.executable, "-m", "slurmlight.train.rollouts.server", *self._options, f"port={self.port}"]
        # the model servers it calls are all inside the job: never through a proxy of the cluster's
        return Child("gateway", command, self._logs / "gateway.log", {KEY_NAME: self.key, "NO_PROXY": "*", "no_proxy": "*"})

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self.check()
            if self._answers():
                return
            time.sleep(0.05)
        raise ChildEnded(f"the gateway did not answer within {_START_S:.0f} s; see {self.child.log}")

    def _answers(self) -> bool:
        """Whether it knows our key: a stranger who has the port would answer too, but refuse it."""
        url, headers = f"http://127.0.0.1:{self.port}/api/rollouts/terminal", {"Authorization": f"Bearer {self.key}"}
        try:
            return httpx.get(url, headers=headers, timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


@dataclass(frozen=True)
class Ended:
    """``rollout`` as the server has it (agentlightning.schemas.Rollout, without its input); ``events`` of its learning channel
    in order, trimmed to ids, log-probabilities and rewards: none where it failed."""

    rollout: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.rollout["rollout_id"]

    @property
    def error(self) -> str:
        """Why it failed; "" where it succeeded."""
        status = self.rollout["status"]
        return "" if status["state"] == "succeeded" else status["error_message"] or "failed without a word"


class GatewayApi:
    """The server's store, as the trainer uses it. Methods raise httpx.HTTPError where the server is gone or refuses."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(
            base_url=f"{url}/api",
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
            trust_env=False,
        )

    def close(self) -> None:
        self._client.close()

    def register_model(self, model: str, endpoint: str) -> None:
        """``endpoint`` ends in /v1."""
        self._post("/models", [{"model": model, "endpoint": endpoint}])

    def enqueue(self, rollouts: Sequence[dict[str, Any]]) -> None:
        """Each with rollout_id, input, is_train (agentlightning.schemas.RolloutCreate)."""
        self._post("/rollouts", list(rollouts))

    def ended(self, after: int) -> tuple[list[Ended], int]:
        """The rollouts that ended since cursor ``after`` (0 at first), and the next cursor."""
        page = self._get("/ended", after=after)
        return [Ended(item["rollout"], item["events"]) for item in page["items"]], page["next_after"]

    def running(self) -> list[dict[str, Any]]:
        return self._get("/rollouts", state_in="running", limit=100_000)

    def fail(self, rollout_id: str, message: str) -> bool:
        """Mark a rollout failed; False where it has ended meanwhile."""
        answer = self._client.patch(f"/rollouts/{rollout_id}", json={"status": {"state": "failed", "error_message": message}})
        if answer.status_code == 409:
            return False
        answer.raise_for_status()
        return True

    def forget(self, rollout_ids: Sequence[str]) -> None:
        """The server keeps every request and answer in memory, and lists walk over all of them."""
        self._post("/forget", list(rollout_ids))

    def _get(self, path: str, **query: Any) -> Any:
        return self._client.get(path, params=query).raise_for_status().json()

    def _post(self, path: str, body: Any) -> None:
        self._client.post(path, json=body).raise_for_status()


def _hydra_text(text: str) -> str:
    """``text`` as a quoted value of Hydra's command line grammar, without interpolation."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
    return f"'{escaped}'"


def key_from_environment() -> str:
    """The gateway's key in a runner. Raises UserError where it is missing."""
    key = os.environ.get(KEY_NAME, "")
    if not key:
        raise UserError(f"{KEY_NAME} is not set", "export the gateway's key; it is never taken from the command line")
    return key
