"""The policy server as a child of the trainer: started, given new weights after every update, watched."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path

import httpx

from slurmlight.train.rollouts.children import Child, ChildEnded, free_port

_KEY_NAME = "SLURMLIGHT_POLICY_KEY"  # policy_server.KEY_NAME
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # its products are too small to share
_START_S = 120.0
_TRIES = 3


class PolicyServer:
    """``with PolicyServer(model, ...) as policy``: a running server of the model in folder ``model``."""

    def __init__(self, model: Path, max_length: int, places: int, logs: Path) -> None:
        self.key = secrets.token_hex(16)
        self._logs = logs
        self._options = [
            *("--model", str(model), "--max-length", str(max_length), "--places", str(places)),
        ]

    def __enter__(self) -> PolicyServer:
        """Raises ChildEnded where the server does not come up."""
        for attempt in range(_TRIES):
            self.port = free_port()
            command = [
                sys.executable,
                "-m",
                "slurmlight.train.embedded.policy_server",
                "--port",
                str(self.port),
                *self._options,
            ]
            self.child = Child("policy server", command, self._logs / "policy.log", {_KEY_NAME: self.key, **_ONE_THREAD})
            self._http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)
            try:
                self._wait_until_healthy()
                return self
            except ChildEnded as error:
                self.__exit__()
                if "address already in use" not in str(error) or attempt == _TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self.child.stop()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def check(self) -> None:
        """Raises ChildEnded where the server is gone."""
        if not self.child.alive:
            raise ChildEnded(f"the {self.child.ending()}; start the run again, it resumes from its last checkpoint")

    def load(self, folder: Path, version: int) -> None:
        """Serve the weights in ``folder``. Raises ChildEnded where the server is gone or refuses them."""
        try:
            answer = self._http.post(
                "/control/load",
                json={"folder": str(folder), "version": version},
                headers={"Authorization": f"Bearer {self.key}"},
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            self.check()
            raise ChildEnded(f"the policy server did not take new weights ({error}); see {self.child.log}") from error

    def generation_cpu_seconds(self) -> float:
        """Spent in prefill and decoding since it started."""
        return self._http.get("/health").raise_for_status().json()["generation_cpu_seconds"]

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self.check()
            try:
                if self._http.get("/health").json().get("pid") == self.child.process.pid:
                    return
            except (httpx.HTTPError, ValueError, AttributeError):
                pass  # not up yet, or a stranger's port: our own then ends by itself
            time.sleep(0.05)
        raise ChildEnded(f"the policy server did not answer within {_START_S:.0f} s; see {self.child.log}")
