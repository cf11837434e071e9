"""Combinations that are known not to work, refused with the reason before anything is submitted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from typing import Any

import msgspec

from slurmlight.errors import UserError
from slurmlight.presets import learning_rules
from slurmlight.presets.schema import Preset
from slurmlight.rewards.catalogue import REWARDS
from slurmlight.slurmtime import minutes

MEMORY = re.compile(r"[0-9]{1,12}([KMGT]B?)?", re.IGNORECASE)
LONGEST_D = 24_855  # sbatch counts seconds in 31 bits: a longer limit silently becomes another one, 71582790 for one 2 minutes


def check(preset: Preset) -> None:
    """Raises UserError for the first rule that ``preset`` breaks."""
    for error in _errors(preset):
        raise error


def _errors(preset: Preset) -> Iterator[UserError]:
    yield from _numbers(preset)
    yield from _batch(preset)
    yield from _job(preset)
    yield from _engine(preset)
    yield from learning_rules.errors(preset)


def _numbers(preset: Preset) -> Iterator[UserError]:
    for key, value in _floats(msgspec.to_builtins(preset), ""):
        if not isfinite(value):
            yield UserError(f"{key}={value:g} is not a finite number", "give one that is")


def _floats(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """Every float at and below ``value`` with its dotted key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _floats(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _floats(inner, f"{key}[{place}]")
    elif isinstance(value, float):
        yield key, value


def _batch(preset: Preset) -> Iterator[UserError]:
    batch, mini = preset.data.train_batch_size, preset.actor_rollout_ref.actor.ppo_mini_batch_size
    n, gpus = preset.actor_rollout_ref.rollout.n, _ranks(preset)
    if n < 2:
        yield UserError(
            f"actor_rollout_ref.rollout.n={n} with adv_estimator=grpo has no group to compare", "set n to 2 or more"
        )
    if batch < mini:
        yield UserError(f"data.train_batch_size={batch} is smaller than ppo_mini_batch_size={mini}", "lower the mini batch")
    if batch % mini:
        yield UserError(f"data.train_batch_size={batch} is not divisible by ppo_mini_batch_size={mini}", "make it a multiple")
    if (batch * n) % gpus:
        yield UserError(
            f"train_batch_size x n = {batch} x {n} = {batch * n} is not divisible by {gpus} GPUs", "change one of them"
        )
    if (mini * n) % gpus:
        yield UserError(
            f"ppo_mini_batch_size x n = {mini} x {n} = {mini * n} is not divisible by {gpus} GPUs", "change one of them"
        )


def _ranks(preset: Preset) -> int:
    """Processes that share a batch: one a GPU, or one a node where there are none."""
    return max(preset.job.gpus, 1) * preset.job.nodes


def _job(preset: Preset) -> Iterator[UserError]:
    job, trainer = preset.job, preset.trainer
    yield from memory("job.mem", job.mem)
    yield from time_limit("job.time", job.time)
    limit = minutes(job.time)
    if limit is not None and limit * 60 <= job.signal_lead_s:
        yield UserError(
            f"job.time={job.time} is not longer than job.signal_lead_s={job.signal_lead_s}: the signal would come at the start",
            "raise the time limit or lower the lead",
        )
    if job.requeue and trainer.save_freq < 1:
        yield UserError(f"job.requeue is on but trainer.save_freq={trainer.save_freq}: nothing to resume from", "set save_freq")


def memory(key: str, text: str) -> Iterator[UserError]:
    """What is wrong with a memory request, which a flag, a profile or a preset may make; empty: none is made."""
    if text and not MEMORY.fullmatch(text):
        yield UserError(f"{key}={text!r} is not an amount of memory", "write a number with K, M, G or T, for instance 64G")


def time_limit(key: str, text: str) -> Iterator[UserError]:
    """What is wrong with a time limit. Raises UserError for text that is none."""
    limit = minutes(text)
    if limit is not None and limit > LONGEST_D * 24 * 60:
        yield UserError(f"{key}={text} is longer than Slurm can count ({LONGEST_D} days)", "ask for less, or for UNLIMITED")


def _engine(preset: Preset) -> Iterator[UserError]:
    model, rollout = preset.actor_rollout_ref.model, preset.actor_rollout_ref.rollout
    if preset.engine.name == "embedded":
        if preset.verl:
            yield UserError("keys under verl. have no meaning for the embedded engine", "remove them")
        if preset.job.nodes > 1 or preset.job.gpus > 0:
            yield UserError("the embedded engine runs on the CPU of one machine", "use --nodes 1 --gpus 0, or a verl preset")
        return
    if preset.engine.stack == "none":
        yield UserError("the verl engine needs engine.stack", "set engine.stack to seed or current")
    if preset.job.gpus and preset.job.gpus % rollout.tensor_model_parallel_size:
        yield UserError(
            f"tensor_model_parallel_size={rollout.tensor_model_parallel_size} does not divide {preset.job.gpus} GPUs",
            "change it",
        )
    yield from _micro_batches(preset)
    if preset.engine.stack == "seed":
        if model.lora_rank > 0:
            yield UserError(
                f"model.lora_rank={model.lora_rank} with verl 0.5.0 + vllm 0.10.2: they disagree and corrupt the policy",
                "set lora_rank to 0",
            )
        if not rollout.free_cache_engine:
            yield UserError(
                "rollout.free_cache_engine=False with verl 0.5.0: weights are never synced, rollouts stay on the base",
                "set it to True",
            )
        if preset.credit.kind != "all":
            yield UserError(
                f"credit.kind={preset.credit.kind} on the seed stack: verl 0.5 knows one advantage for all calls of an episode",
                "use credit.kind=all, or --stack current",
            )


def _micro_batches(preset: Preset) -> Iterator[UserError]:
    """verl asserts it minutes into the job, after the first rollout (workers/engine/utils.py, workers/fsdp_workers.py)."""
    parts = preset.actor_rollout_ref
    rows = parts.actor.ppo_mini_batch_size * parts.rollout.n // _ranks(preset)
    sizes = {
        "actor.ppo_micro_batch_size_per_gpu": parts.actor.ppo_micro_batch_size_per_gpu,
        "rollout.log_prob_micro_batch_size_per_gpu": parts.rollout.log_prob_micro_batch_size_per_gpu,
    }
    if parts.actor.use_kl_loss or preset.algorithm.use_kl_in_reward:
        sizes["ref.log_prob_micro_batch_size_per_gpu"] = parts.ref.log_prob_micro_batch_size_per_gpu
    for name, size in sizes.items():
        if rows % size:
            yield UserError(
                f"ppo_mini_batch_size x n / GPUs = {rows} rows is not divisible by {name}={size}", "change one of them"
            )


def warnings(preset: Preset) -> list[str]:
    """What works but has bitten others; shown once at launch."""
    found = []
    share = preset.actor_rollout_ref.rollout.gpu_memory_utilization
    if preset.engine.stack == "seed" and share > 0.6:
        found.append(
            f"gpu_memory_utilization={share} on the seed stack: wake-up runs out of memory around step 55; 0.6 is safe"
        )
    if preset.job.gpus and preset.engine.stack == "seed":
        found.append("the seed stack trains on a CPU (make test-seed); on a GPU it has not been run yet: try preset fast first")
    if preset.job.gpus and preset.engine.stack == "current":
        found.append(
            "runs of the verl engine have finished on one and two H200s of one node; A800s, more GPUs and several nodes with"
            " GPUs have not been run yet: try preset fast first"
        )
    if varying := [part.name for part in preset.reward if part.name in REWARDS and REWARDS[part.name].varies]:
        found.append(f"reward {', '.join(varying)} measures time: a resumed run will not repeat the same bits")
    return found
