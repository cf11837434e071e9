"""Bring up Ray, check verl's configuration without a GPU, and build the trainer with its workers."""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from agentlightning.verl.dataset import LoadedDataset
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.tokenizer import hf_tokenizer

from slurmlight.errors import UserError
from slurmlight.train import raysession
from slurmlight.train.verl.group import Group
from slurmlight.train.verl.trainer import Trainer


def check(config: DictConfig, gpus: int, nodes: int = 1) -> None:
    """verl's own checks, before anything is started. Raises UserError with verl's words, or for what is not there."""
    raysession.check_machine(gpus, nodes, torch.cuda.device_count())
    OmegaConf.resolve(config)
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError, TypeError, KeyError, InstantiationException) as error:
        words = " ".join(str(error.__cause__ or error).split())  # of a refused section: Hydra wraps what verl said
        raise UserError(f"verl refuses this configuration ({words})", "correct the preset") from error


def ray_session(scratch: Path, variables: Mapping[str, str], gpus: int, cpus: int) -> contextlib.AbstractContextManager[None]:
    """``raysession.ray_session`` with what this stack's workers need."""
    runtime = dict(get_ppo_ray_runtime_env())
    runtime["env_vars"] = {**runtime.get("env_vars", {}), **variables}
    return raysession.ray_session(scratch, runtime, gpus, cpus)


def trainer(config: DictConfig, train: Sequence[Mapping[str, Any]], val: Sequence[Mapping[str, Any]]) -> Trainer:
    """The trainer with its FSDP workers and vLLM servers running (on a GPU: a minute or two)."""
    from slurmlight.train.verl.servers import start_servers  # imports vLLM, which the checks above do without

    start_servers(config)
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    tasks = BaseTaskRunner()
    tasks.add_actor_rollout_worker(config)
    tasks.add_critic_worker(config)
    built = Trainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=tasks.role_worker_mapping,
        resource_pool_manager=tasks.init_resource_pool_mgr(config),
        ray_worker_group_cls=Group,
        train_dataset=LoadedDataset(train),
        val_dataset=LoadedDataset(val),
    )
    built.init_workers()
    return built
