"""Agent-Lightning's LLM proxy (litellm in a process of its own): on the loopback interface, on a leash, watched."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentlightning.llm_proxy import LLMProxy
from agentlightning.utils.server_launcher import PythonServerLauncherArgs

from slurmlight.train.rollouts.children import ChildEnded, free_port
from slurmlight.train.seed.leash import leash


class LeashedProxy(LLMProxy):
    """``log`` gets what it prints; its port is its own."""

    def __init__(self, log: Path) -> None:
        super().__init__(
            launcher_args=PythonServerLauncherArgs(
                host="127.0.0.1", port=free_port(), launch_mode="mp", healthcheck_url="/health", startup_timeout=120.0
            )
        )
        self.log = log

    def check(self) -> None:
        """Raises ChildEnded where its process is gone: with it go all calls under way."""
        process: Any = getattr(self.server_launcher, "_proc", None)
        if self.is_running() and process is not None and not process.is_alive():
            code = process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ChildEnded(f"the LLM proxy {how}; see {self.log}; start the run again, it resumes from its last checkpoint")

    @asynccontextmanager
    async def _serve_context(self) -> AsyncGenerator[None, None]:
        """Runs in the proxy's process."""
        leash()
        os.setsid()
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"  # it calls vLLM's servers only
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        async with super()._serve_context():
            yield
