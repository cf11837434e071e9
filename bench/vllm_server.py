"""vLLM's own HTTP server on the CPU with the way past its chat handler (train/verl/chat.py), for a bench and a test of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from slurmlight.train.rollouts.children import free_port
from slurmlight.train.verl import environment

OWN = {"x-own": "1"}  # a header that keeps a call with vLLM's own handler
OPTIONS = (
    "--served-model-name=policy --enforce-eager --dtype=float32 --host=127.0.0.1 --middleware=slurmlight.train.verl.chat.Quick"
)
START_S = 300.0


@contextmanager
def serving(scratch: Path, model: Path, options: str) -> Iterator[tuple[str, int]]:
    """The server's URL and the pid of its front end. Raises RuntimeError with the end of its log where it does not come up."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    variables = environment.COMMON | environment.cpu(scratch)
    del variables[environment.PLUG_IN]  # verl is not imported here
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    with open(scratch / "log", "w") as log:
        arguments = [*command, *OPTIONS.split(), *options.split()]
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=os.environ | variables)
        try:
            _wait(process, url, scratch / "log")
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(f"{url}/health", trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not come up: {log.read_text()[-3000:]}")
