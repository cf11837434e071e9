"""Preset -> verl 0.5's configuration, under verl's own key names. Unknown keys and this stack's traps are refused by name."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict

from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.train.verlkeys import check_known, from_preset

# Sections that take any key, and keys that verl 0.5 reads without listing them.
FREE = (
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.actor.optim.betas",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.actor.fsdp_config.model_dtype",
    "actor_rollout_ref.rollout.seed",
)
_ABSENT = {"actor_rollout_ref.ref.fsdp_config.optimizer_offload"}  # a key of later versions; a reference has no optimiser
_ROLLOUT = "actor_rollout_ref.rollout"
# Keys that this stack takes and does not obey, or that break it: why, and what to do.
REFUSED: dict[str, tuple[str, str]] = {
    f"{_ROLLOUT}.engine_kwargs": ("verl 0.5's vLLM server builds its arguments itself and ignores them", "remove it"),
    f"{_ROLLOUT}.max_num_seqs": ("verl 0.5's vLLM server ignores it", "remove it"),
    f"{_ROLLOUT}.load_format": ("verl 0.5's vLLM server ignores it", "remove it"),
    f"{_ROLLOUT}.agent.num_workers": ("verl's own agent loop is not used; its workers would idle", "remove it"),
    f"{_ROLLOUT}.mode": ("agents need the asynchronous server", "remove it"),
    "actor_rollout_ref.model.override_config.attn_implementation": (
        "transformers 4.56 does not switch a loaded model by this name",
        "write verl.actor_rollout_ref.model.override_config._attn_implementation",
    ),
}


def build(preset: Preset, *, folder: Path, gpus: int, nodes: int) -> DictConfig:
    """The whole configuration. ``gpus`` are those of a node (0: the CPU stands for one).

    Raises UserError for a key that verl does not have, with the nearest that it has, and for what this stack cannot do.
    """
    for error in traps(preset, folder):
        raise error
    logging.getLogger("hydra").setLevel(logging.ERROR)
    with initialize_config_module("agentlightning.verl", version_base=None):
        config = compose("config")
    with open_dict(config):
        known = {name: value for name, value in from_preset(preset).items() if name not in _ABSENT}
        for values in (known, _kit(preset, folder, max(gpus, 1), nodes), {} if gpus else _cpu(), preset.verl):
            for name, value in values.items():
                if not any(name == free or name.startswith(f"{free}.") for free in FREE):
                    check_known(config, name)
                OmegaConf.update(config, name, value, merge=False, force_add=True)
        config.agentlightning.seed = preset.engine.seed  # of the order of rows, see trainer.py
    return config


def traps(preset: Preset, folder: Path) -> Iterator[UserError]:
    """What this stack would do wrong without a word. The presets' own rules refuse LoRA and free_cache_engine=False."""
    if not folder.is_absolute():
        yield UserError(
            f"checkpoint folder {folder} is relative: after a requeue verl would look elsewhere and start from zero",
            "give an absolute path",
        )
    for name in preset.verl:
        for key, (why, mend) in REFUSED.items():
            if name == key or name.startswith(f"{key}."):
                yield UserError(f"verl key '{name}' on the seed stack: {why}", mend)
    settings = {**preset.verl}
    if settings.get("trainer.default_local_dir", str(folder)) != str(folder):
        yield UserError("verl key 'trainer.default_local_dir': checkpoints belong to the run folder", "remove it")
    if settings.get(f"{_ROLLOUT}.free_cache_engine", True) is not True:
        yield UserError("rollout.free_cache_engine=False with verl 0.5.0: weights are never synced", "remove it")
    if settings.get("actor_rollout_ref.model.lora_rank", 0):
        yield UserError("LoRA with verl 0.5.0 + vllm 0.10.2: they disagree and corrupt the policy", "remove lora_rank")
    if "/" not in preset.actor_rollout_ref.model.path.strip("/"):
        yield UserError(
            f"model.path={preset.actor_rollout_ref.model.path}: verl 0.5 serves a model under its path's last two parts",
            "give a path of two parts or more, for instance models/Qwen3-1.7B",
        )


def _kit(preset: Preset, folder: Path, gpus: int, nodes: int) -> dict[str, Any]:
    """What follows from the run and from this kit's way of driving verl."""
    data = preset.data
    return {
        "data.train_files": None,
        "data.val_files": None,
        "data.dataloader_num_workers": 0,
        f"{_ROLLOUT}.mode": "async",
        f"{_ROLLOUT}.seed": preset.engine.seed,
        f"{_ROLLOUT}.max_model_len": data.max_prompt_length + data.max_response_length,
        f"{_ROLLOUT}.agent.num_workers": 0,
        f"{_ROLLOUT}.agent.custom_async_server.path": "pkg://slurmlight.train.seed.server",
        f"{_ROLLOUT}.agent.custom_async_server.name": "SeedServer",
        "trainer.n_gpus_per_node": gpus,
        "trainer.nnodes": nodes,
        "trainer.default_local_dir": str(folder),
        "trainer.logger": ["console"],
        "actor_rollout_ref.model.override_config": {} if preset.actor_rollout_ref.model.use_remove_padding else _SDPA,
    }


_SDPA = {"_attn_implementation": "sdpa"}  # without flash-attn; with the underscore it switches the model, without it does not


def _cpu() -> dict[str, Any]:
    """Single precision, no compiler; one process plays the GPU."""
    single: Mapping[str, str] = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    return {
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.mixed_precision": single,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.override_config": _SDPA,
        f"{_ROLLOUT}.enforce_eager": True,
        f"{_ROLLOUT}.dtype": "float32",
        f"{_ROLLOUT}.max_num_batched_tokens": 2048,
        "trainer.balance_batch": False,
    }
