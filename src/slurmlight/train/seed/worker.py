"""The FSDP worker whose vLLM side answers with its errors, as verl 0.5's does not: there an exception ends the thread that
answers, and the engine waits for ever."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
import pickle
import threading
import traceback
from pathlib import Path
from typing import Any

import ray
import zmq
from verl.workers.fsdp_workers import AsyncActorRolloutRefWorker
from verl.workers.rollout import vllm_rollout
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMAsyncRollout

from slurmlight.train.seed.failure import SCRATCH, Failure, note


class Rollout(vLLMAsyncRollout):
    """verl's rollout with its own socket (no lock or name shared with other jobs), answers for errors, and a thread that ends
    with the worker."""

    def _init_zeromq(self) -> str:
        self.socket = zmq.Context().socket(zmq.REP)
        if self.config.tensor_model_parallel_size <= int(os.environ["RAY_LOCAL_WORLD_SIZE"]):
            scratch = Path(os.environ[SCRATCH])
            scratch.mkdir(exist_ok=True)
            address = f"ipc://{scratch}/vllm-{os.getpid()}.ipc"
            self.socket.bind(address)
        else:
            node = f"tcp://{ray.util.get_node_ip_address()}"
            address = f"{node}:{self.socket.bind_to_random_port(node)}"
        self.loop_thread = threading.Thread(target=self._loop_forever, daemon=True)
        self.loop_thread.start()
        return address

    def _loop_forever(self) -> None:
        while True:
            method, args, kwargs = pickle.loads(self.socket.recv())
            try:
                answer = self.execute_method(method, *args, **kwargs)
            except Exception as error:
                traceback.print_exc()
                name = method if isinstance(method, str) else "a function"
                told = f"the vLLM worker failed in {name}: {type(error).__name__}: {error}"
                note(told)
                answer = Failure(told)
            self.socket.send(pickle.dumps(answer))


class SeedWorker(AsyncActorRolloutRefWorker):
    def _build_rollout(self, trust_remote_code: bool = False) -> Any:
        vllm_rollout.vLLMAsyncRollout = Rollout  # verl takes the class by this name
        return super()._build_rollout(trust_remote_code)
