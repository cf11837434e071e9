"""Check verl 0.5's configuration without a GPU, and build the trainer with its workers."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.fsdp_workers import ActorRolloutRefWorker

from slurmlight.errors import UserError
from slurmlight.modelversion import check_transformers
from slurmlight.train.raysession import check_machine
from slurmlight.train.seed.daemon import Daemon
from slurmlight.train.seed.trainer import Trainer
from slurmlight.train.seed.worker import SeedWorker


def check(config: DictConfig, gpus: int, nodes: int) -> None:
    """verl's own checks, before anything is started. Raises UserError with verl's words, or for what is not there."""
    check_machine(gpus, nodes, torch.cuda.device_count())
    check_transformers(version("transformers"))
    OmegaConf.resolve(config)
    checked = object.__new__(_Checked)
    checked.config, checked.use_critic, checked.use_rm = config, False, False
    checked.use_reference_policy = _needs_reference(config)
    try:
        checked._validate_config()
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        words = str(error) or "an assertion of its _validate_config"
        raise UserError(f"verl refuses this configuration ({words})", "correct the preset") from error


class _Checked(RayPPOTrainer):
    """``_validate_config`` without the rest."""


def _needs_reference(config: DictConfig) -> bool:
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def runtime(variables: Mapping[str, str]) -> dict[str, Any]:
    """The environment of every Ray worker: verl's own variables, the run's on top."""
    own = get_ppo_ray_runtime_env()
    return {**own, "env_vars": {**own.get("env_vars", {}), **variables}}


def trainer(
    config: DictConfig,
    train: Sequence[Mapping[str, Any]],
    val: Sequence[Mapping[str, Any]],
    store: Any,
    proxy: Any,
    adapter: Any,
) -> Trainer:
    """The trainer with its FSDP workers and vLLM servers running (on a GPU: a minute or two)."""
    workers: dict[Any, Any] = {Role.ActorRollout: ray.remote(SeedWorker)}
    if _needs_reference(config):
        workers[Role.RefPolicy] = ray.remote(ActorRolloutRefWorker)
    pool = "global_pool"
    pools = {pool: [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
    built = Trainer(
        config=config,
        tokenizer=hf_tokenizer(config.actor_rollout_ref.model.path),
        role_worker_mapping=workers,
        resource_pool_manager=ResourcePoolManager(resource_pool_spec=pools, mapping=dict.fromkeys(workers, pool)),
        ray_worker_group_cls=RayWorkerGroup,
        train_dataset=train,
        val_dataset=val,
        store=store,
        llm_proxy=proxy,
        adapter=adapter,
        daemon_cls=Daemon,
    )
    built.init_workers()
    return built
