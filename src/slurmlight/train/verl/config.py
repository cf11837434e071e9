"""Preset -> verl's configuration, under verl's own key names; a key verl does not know is refused (verl merges it silently)."""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict

from slurmlight.presets import Preset
from slurmlight.train.verlkeys import check_known, from_preset

# Sections that take any key: verl hands them to somebody else.
FREE = ("actor_rollout_ref.model.override_config", "actor_rollout_ref.rollout.engine_kwargs", "ray_kwargs.ray_init")


def build(preset: Preset, *, folder: Path, gpus: int, nodes: int) -> DictConfig:
    """The whole configuration but for the gateway's URL and key. ``gpus`` are those of a node (0: the CPU stands for one).

    Raises UserError for a key that verl does not have, with the nearest that it has.
    """
    logging.getLogger("hydra").setLevel(logging.ERROR)
    with initialize_config_module("agentlightning.verl", version_base=None):
        config = compose("config")
    with open_dict(config):
        for values in (
            from_preset(preset),
            _kit(preset, folder, max(gpus, 1), nodes),
            {} if gpus else _cpu(preset),
            preset.verl,
        ):
            for name, value in values.items():
                _set(config, name, value)
    return config


def _kit(preset: Preset, folder: Path, gpus: int, nodes: int) -> dict[str, Any]:
    """What follows from the run and from this kit's way of driving verl."""
    data, rollout = preset.data, preset.actor_rollout_ref.rollout
    return {
        "agentlightning.rollout_timeout_seconds": int(preset.runner.rollout_timeout_s),
        # a call whose prompt continues the one before (a rewrite after a first query) shares its row: two completions and
        # what was said between them
        "agentlightning.trace_aggregator.trajectory_max_prompt_length": data.max_prompt_length,
        "agentlightning.trace_aggregator.trajectory_max_response_length": 2 * data.max_response_length
        + data.max_prompt_length // 2,
        "data.train_files": None,
        "data.val_files": None,
        "data.seed": preset.engine.seed,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.seed": preset.engine.seed,
        "actor_rollout_ref.rollout.max_model_len": data.max_prompt_length + data.max_response_length,
        "actor_rollout_ref.rollout.agent.num_workers": 0,  # verl's own agent loop is not used, nor its rewards: each of
        "reward.num_workers": 0,  # their processes would import vLLM and verl
        "actor_rollout_ref.rollout.val_kwargs.temperature": 0.0,
        "actor_rollout_ref.rollout.load_format": "auto",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.middleware": "slurmlight.train.verl.chat.Quick",
        "trainer.n_gpus_per_node": gpus,
        "trainer.nnodes": nodes,
        "trainer.default_local_dir": str(folder),
        "trainer.logger": ["console"],
        "trainer.use_v1": False,
        "actor_rollout_ref.rollout.enable_sleep_mode": rollout.free_cache_engine,
        "actor_rollout_ref.model.override_config": {} if preset.actor_rollout_ref.model.use_remove_padding else _SDPA,
        # vLLM's engine and its only worker as one process: one less to start, which takes 15 to 40 s of imports
        **({_EXECUTOR: "uni"} if rollout.tensor_model_parallel_size == 1 else {}),
    }


_EXECUTOR = "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend"
_SDPA = {"attn_implementation": "sdpa"}


def _cpu(preset: Preset) -> dict[str, Any]:
    """No compiler, no CUDA graphs, no sleeping engine; one process plays the GPU."""
    return {
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.ref.use_torch_compile": False,
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.override_config": _SDPA,
        "actor_rollout_ref.rollout.enforce_eager": True,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.rollout.enable_sleep_mode": False,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1,
        "trainer.balance_batch": False,
    }


def _set(config: DictConfig, name: str, value: Any) -> None:
    if not any(name == free or name.startswith(f"{free}.") for free in FREE):
        check_known(config, name)
    OmegaConf.update(config, name, value, merge=False, force_add=True)
