"""Preset -> verl's configuration: verl's names, the kit's choices, refusals. Needs verl (mark ``stack``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmlight.errors import UserError
from slurmlight.presets import load

pytestmark = pytest.mark.stack
pytest.importorskip("verl", reason="verl is not installed (requirements-stack.lock)")
pytest.importorskip("agentlightning.verl", reason="verl is not installed (requirements-stack.lock)")

TINY = (
    "engine.name=verl",
    "engine.stack=current",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
)


def build(preset: str = "tiny", *overrides: str, gpus: int = 0) -> Any:
    from slurmlight.train.verl import config

    given = (*TINY, *overrides) if preset == "tiny" else overrides
    return config.build(load(preset, given), folder=Path("/run"), gpus=gpus, nodes=1)


def test_preset_keys_arrive_under_the_same_names() -> None:
    built = build()
    assert built.data.train_batch_size == 12
    assert built.actor_rollout_ref.actor.optim.lr == 3e-4
    assert list(built.actor_rollout_ref.actor.optim.betas) == [0.9, 0.99]
    assert built.actor_rollout_ref.rollout.n == 8
    assert built.trainer.total_training_steps == 30
    assert built.trainer.default_local_dir == "/run"


def test_rollout_level_advantage_and_loss_are_the_default_and_an_override_wins() -> None:
    built = build()
    assert built.algorithm.enable_rollout_level_advantage is True
    assert built.actor_rollout_ref.actor.policy_loss.loss_mode == "per_rollout_mean"
    assert built.agentlightning.trace_aggregator.level == "trajectory"
    other = build("tiny", "verl.agentlightning.trace_aggregator.level=transition", "verl.data.seed=7")
    assert other.agentlightning.trace_aggregator.level == "transition"
    assert other.data.seed == 7


def test_an_engine_on_one_gpu_is_one_process_and_an_override_wins() -> None:
    key = "distributed_executor_backend"

    def engine(*overrides: str) -> Any:
        return build("qwen", "engine.stack=current", *overrides, gpus=4).actor_rollout_ref.rollout.engine_kwargs.vllm

    assert engine()[key] == "uni"
    assert engine(f"verl.actor_rollout_ref.rollout.engine_kwargs.vllm.{key}=mp")[key] == "mp"
    assert key not in engine("actor_rollout_ref.rollout.tensor_model_parallel_size=2")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("verl.trainer.save_freqq=3", "save_freq"),
        ("verl.actor_rollout_ref.rollout.max_num_seq=3", "max_num_seqs"),
        ("verl.actor_rollout_ref.actor.ppo_epoch=3", "ppo_epochs"),
        ("verl.trianer.nnodes=3", "trainer"),
    ],
)
def test_a_key_verl_does_not_have_is_refused_with_the_nearest(key: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"unknown verl key.*did you mean.*{near}"):
        build("tiny", key)


def test_a_value_is_no_section() -> None:
    with pytest.raises(UserError, match="is a value, not a section"):
        build("tiny", "verl.trainer.nnodes.more=3")


def test_keys_that_verl_hands_on_are_free() -> None:
    built = build("tiny", "verl.actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs=5")
    assert built.actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs == 5


def test_cpu_and_gpu_settings() -> None:
    cpu, gpu = build(), build("qwen", "engine.stack=current", gpus=4)
    assert cpu.actor_rollout_ref.rollout.enforce_eager and not gpu.actor_rollout_ref.rollout.enforce_eager
    assert cpu.actor_rollout_ref.model.override_config.attn_implementation == "sdpa"
    assert gpu.actor_rollout_ref.model.override_config == {}
    assert (cpu.trainer.n_gpus_per_node, gpu.trainer.n_gpus_per_node) == (1, 4)
    assert gpu.actor_rollout_ref.rollout.enable_sleep_mode is True
    assert cpu.actor_rollout_ref.rollout.enable_sleep_mode is False


def test_memory_and_stability_options_arrive_under_verls_names() -> None:
    """Their shape only: what they save is for a GPU to show."""
    plain = build("qwen", "engine.stack=current", gpus=4).actor_rollout_ref
    assert plain.actor.strategy == "fsdp2" and plain.model.enable_gradient_checkpointing and plain.model.use_remove_padding
    built = build(
        "qwen",
        "engine.stack=current",
        "verl.actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        gpus=4,
    ).actor_rollout_ref
    assert built.actor.strategy == "fsdp" and not built.model.enable_gradient_checkpointing
    assert built.actor.fsdp_config.param_offload and built.actor.fsdp_config.optimizer_offload
    assert (built.actor.use_kl_loss, built.actor.kl_loss_coef, built.actor.entropy_coeff) == (True, 0.1, 0.01)


def test_verl_accepts_what_is_built_and_refuses_with_one_line() -> None:
    from slurmlight.train.verl import start

    start.check(build(), gpus=0)
    with pytest.raises(UserError, match="this machine shows"):
        start.check(build(), gpus=64)
    broken = build()
    broken.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = None
    with pytest.raises(UserError, match="verl refuses this configuration"):
        start.check(broken, gpus=0)


def test_smol_and_llama_build() -> None:
    assert build("smol", gpus=1).actor_rollout_ref.actor.use_torch_compile is False
    assert build("llama", "engine.stack=current", gpus=4).actor_rollout_ref.model.path.endswith("Llama-3.2-1B-Instruct")
