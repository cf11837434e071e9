"""vLLM's server and engine process for verl 0.5, which end with the run and notice that a worker is gone."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from agentlightning.verl.async_server import PatchedvLLMServer, _unwrap_ray_remote
from verl.workers.rollout.vllm_rollout.vllm_async_server import ExternalZeroMQDistributedExecutor

from slurmlight.train.seed.failure import WorkerFailed, note
from slurmlight.train.seed.leash import leash

_LOOK_MS = 1000


class WatchfulExecutor(ExternalZeroMQDistributedExecutor):
    """In vLLM's engine process. As verl has it, it would outlive its server, and wait for ever for a worker that died."""

    def _init_executor(self) -> None:
        leash()
        addresses = os.environ["VERL_VLLM_ZMQ_ADDRESSES"].split(",")
        self._pids = [int(found[1]) for one in addresses if (found := re.search(r"vllm-(\d+)\.ipc$", one))]
        super()._init_executor()

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        """Raises WorkerFailed: what a worker raised, or that its process is gone."""
        sent = method if isinstance(method, str) else pickle.dumps(method)
        message = pickle.dumps((sent, args, kwargs or {}))
        for socket in self.sockets:
            socket.send(message)
        return [self._answer(socket) for socket in self.sockets]

    def _answer(self, socket: Any) -> Any:
        while not socket.poll(_LOOK_MS):
            gone = [pid for pid in self._pids if not Path(f"/proc/{pid}").exists()]
            if gone:
                told = f"the vLLM worker with process id {gone[0]} is gone; the node's memory may have run out"
                note(told)
                raise WorkerFailed(told)
        return pickle.loads(socket.recv())


@ray.remote(num_cpus=1)
class SeedServer(_unwrap_ray_remote(PatchedvLLMServer)):
    def _create_engine_config(self, engine_args: Any) -> Any:
        config = super()._create_engine_config(engine_args)
        config.parallel_config.distributed_executor_backend = WatchfulExecutor
        return config
