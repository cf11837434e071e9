"""vLLM's server processes, started sooner: they import torch, vLLM and verl (15 to 40 s) while the FSDP workers do.

verl makes them when the workers are ready, and one more process for its own agent loop, which is not used here.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import DictConfig
from verl.plugin.platform import get_platform
from verl.trainer.ppo import ray_trainer
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


class Server(vLLMHttpServer):
    """verl's server in a process that was there before it was known what to serve, and where."""

    def __init__(self) -> None:
        pass

    def begin(self, **given: Any) -> None:
        super().__init__(**given)


class Started:
    """A server that runs already, where verl would make its actor."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def remote(self, **given: Any) -> Any:
        ray.get(self.server.begin.remote(**given))
        return self.server


class Servers(LLMServerManager):
    """verl's servers, without the process that would spread verl's own calls over them: the gateway spreads the episodes'."""

    rollout_replica_class: type[vLLMReplica] = vLLMReplica

    async def _init_global_load_balancer(self) -> None:
        self.global_load_balancer = None


def start_servers(config: DictConfig) -> None:
    """Start the server processes of a run on one node now, for verl to find later. Several nodes: verl makes them itself."""
    ray_trainer.LLMServerManager = Servers  # pyright: ignore[reportPrivateImportUsage]
    if config.trainer.nnodes > 1:
        return
    rollout, platform = config.actor_rollout_ref.rollout, get_platform()
    a_replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    calls = max(1000, 2 * rollout.max_num_seqs)  # at a time, generous as verl's own figure
    variables = {name: "1" for name in platform.ray_noset_envvars()} | platform.rollout_env_vars()
    servers = {
        name: ray.remote(Server).options(name=name, runtime_env={"env_vars": variables}, max_concurrency=calls).remote()
        for name in (f"vllm_server_{replica}_0" for replica in range(config.trainer.n_gpus_per_node // a_replica))
    }

    class Replica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = SimpleNamespace(options=lambda *, name, **_: Started(servers[name]))

    Servers.rollout_replica_class = Replica
