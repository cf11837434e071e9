"""Rules on rewards, credit, curriculum, stability and memory: what cannot work is refused with its reason before a submit."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from typing import Any

from slurmlight.errors import UserError, unknown_name
from slurmlight.presets.schema import Preset
from slurmlight.rewards.catalogue import REWARDS

EASIEST = 0.25  # difficulty of an easy question: data.difficulty
_STRATEGY = "actor_rollout_ref.actor.strategy"
_OPTIMIZER = "actor_rollout_ref.actor.optim.optimizer_impl"


def errors(preset: Preset) -> Iterator[UserError]:
    yield from _rewards(preset)
    yield from _credit(preset)
    yield from _curriculum(preset)
    yield from _stability(preset)
    yield from _memory(preset)


def _rewards(preset: Preset) -> Iterator[UserError]:
    names = [part.name for part in preset.reward]
    for part in preset.reward:
        if not part.file and part.name not in REWARDS:
            yield unknown_name("reward", part.name, REWARDS)
        if part.file and (part.name in REWARDS or not part.name.isidentifier()):
            yield UserError(f"reward '{part.name}' of {part.file} needs a name of its own", "name it as its function")
    if len(set(names)) < len(names):
        yield UserError(f"[[reward]] names one part twice ({', '.join(names)})", "add their weights up in one")
    total = sum(part.weight for part in preset.reward)
    if not isclose(total, 1.0, abs_tol=1e-6):
        yield UserError(f"the weights of [[reward]] sum to {total:g}, not to 1", "change them so that they do")


def _credit(preset: Preset) -> Iterator[UserError]:
    if preset.credit.kind != "process":
        return
    if "process" not in [part.name for part in preset.reward]:
        yield UserError("credit.kind=process needs the reward that it takes apart", 'add a [[reward]] with name = "process"')
    if preset.engine.name == "verl":
        yield UserError(
            "credit.kind=process needs a reward for each call, and Agent-Lightning hands verl one an episode",
            "use credit.kind=discounted or last",
        )


def _curriculum(preset: Preset) -> Iterator[UserError]:
    phases, sampling = preset.curriculum, preset.sampling
    if (phases or sampling.prefer_mixed) and preset.engine.name == "verl":
        yield UserError(
            "curriculum and sampling.prefer_mixed choose the tasks of each step, which verl's own data loader does",
            "give data.train_files the tasks of one phase after the other, or use the embedded engine",
        )
    if sampling.difficulty == "solve_rate" and not phases:
        yield UserError("sampling.difficulty=solve_rate has no curriculum to use it", "add [[curriculum]] phases")
    for number, phase in enumerate(phases, 1):
        if phase.rounds and phase.steps:
            yield UserError(f"curriculum phase {number} has a length in rounds and in steps", "give one of them")
        if number < len(phases) and not (phase.rounds or phase.steps):
            yield UserError(f"curriculum phase {number} has no length, so the next one never comes", "give rounds or steps")
        if sampling.difficulty == "hardness" and phase.difficulty < EASIEST:
            yield UserError(
                f"curriculum phase {number} has no tasks: difficulty={phase.difficulty:g} and easy questions have {EASIEST:g}",
                "raise its difficulty",
            )


def _stability(preset: Preset) -> Iterator[UserError]:
    steady, actor = preset.stability, preset.actor_rollout_ref.actor
    if steady.target_kl and not actor.use_kl_loss:
        yield UserError("stability.target_kl adapts the coefficient of a KL loss that is off", "set actor.use_kl_loss=true")
    if steady.target_kl and not 0 < actor.kl_loss_coef <= steady.kl_coef_max:
        yield UserError(
            f"actor.kl_loss_coef={actor.kl_loss_coef:g} is not between 0 and stability.kl_coef_max={steady.kl_coef_max:g}",
            "start the coefficient inside",
        )
    if preset.engine.name != "verl":
        return
    if steady.target_kl:
        yield UserError(
            "verl keeps the coefficient of its KL loss for a whole run, so stability.target_kl cannot adapt it",
            "adapt the KL in the reward: algorithm.use_kl_in_reward=true verl.algorithm.kl_ctrl.type=adaptive",
        )
    if steady.on_alarm == "fallback":
        yield UserError(
            "stability.on_alarm=fallback reloads weights and optimiser inside a step, which verl's workers do at a start only",
            "use stop, then launch again with a smaller learning rate",
        )
    if preset.scoring.normalize or preset.scoring.clip:
        yield UserError(
            "scoring.normalize and clip work on rewards before Agent-Lightning makes its rows, where verl gives no access",
            "leave algorithm.norm_adv_by_std_in_grpo on: it normalises each group",
        )


def _memory(preset: Preset) -> Iterator[UserError]:
    """Gradient checkpointing works in both engines; the rest are verl's own keys, handed on as they are."""
    if preset.engine.name == "embedded":
        yield from _embedded_memory(preset)
        return
    strategy, optimizer = str(preset.verl.get(_STRATEGY, "fsdp2")), str(preset.verl.get(_OPTIMIZER, ""))
    if strategy not in ("fsdp", "fsdp2"):
        why = "verl has no DeepSpeed engine" if strategy == "deepspeed" else "this kit's images and checkpoints know no other"
        yield UserError(f"verl.{_STRATEGY}={strategy}: {why}", "use fsdp or fsdp2, with param_offload for more room")
    if optimizer.startswith(("bitsandbytes", "torchao")):
        yield UserError(
            f"verl.{_OPTIMIZER}={optimizer}: {optimizer.split('.')[0]} is in none of the images: no 8-bit optimiser was run",
            "use fsdp_config.optimizer_offload=true, which frees more",
        )


def _embedded_memory(preset: Preset) -> Iterator[UserError]:
    policy = preset.actor_rollout_ref
    offloads: dict[str, Any] = {
        "actor.fsdp_config.param_offload": policy.actor.fsdp_config.param_offload,
        "actor.fsdp_config.optimizer_offload": policy.actor.fsdp_config.optimizer_offload,
        "ref.fsdp_config.param_offload": policy.ref.fsdp_config.param_offload,
        "ref.fsdp_config.optimizer_offload": policy.ref.fsdp_config.optimizer_offload,
    }
    for name, value in offloads.items():
        if value:
            yield UserError(f"{name}: the embedded engine keeps everything on the CPU as it is", "set it to false")
    if policy.model.use_remove_padding:
        yield UserError("model.use_remove_padding: the embedded engine pads its few short rows", "set it to false")
