"""Preset -> verl 0.5's configuration: refusals with their reasons, and (mark ``seed``) the keys that arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmlight.errors import UserError
from slurmlight.presets import load
from slurmlight.train.seed import config

TINY = (
    "engine.name=verl",
    "engine.stack=seed",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
)
RUN = Path("/run")


def refused(*overrides: str, folder: Path = RUN) -> str:
    with pytest.raises(UserError) as caught:
        for error in config.traps(load("qwen", overrides), folder):
            raise error
    return str(caught.value)


def test_the_documented_preset_has_no_trap() -> None:
    assert not list(config.traps(load("qwen"), RUN))


def test_a_relative_checkpoint_folder_is_refused() -> None:
    assert "after a requeue" in refused(folder=Path("checkpoints/run"))
    assert "belong to the run folder" in refused("verl.trainer.default_local_dir=checkpoints/mine")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("verl.actor_rollout_ref.rollout.free_cache_engine=False", "never synced"),
        ("verl.actor_rollout_ref.model.lora_rank=8", "corrupt the policy"),
        ("verl.actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=3", "ignores them"),
        ("verl.actor_rollout_ref.rollout.max_num_seqs=3", "ignores it"),
        ("verl.actor_rollout_ref.rollout.mode=sync", "asynchronous server"),
        ("verl.actor_rollout_ref.model.override_config.attn_implementation=sdpa", "_attn_implementation"),
        ("actor_rollout_ref.model.path=Qwen3", "two parts"),
    ],
)
def test_traps_are_refused_with_the_reason(key: str, told: str) -> None:
    assert told in refused(key)


def test_only_a_run_without_gpus_imports_the_cpu_lane() -> None:
    package = Path(config.__file__).parent
    naming = {
        path.name for path in package.parent.rglob("*.py") if "cpu_lane" in path.read_text() and path.parent.name != "cpu_lane"
    }
    assert naming == {"engine.py"}
    before, _, after = (package / "engine.py").read_text().partition("if self.gpus:")
    assert "cpu_lane" not in before and "else:" in after[: after.index("cpu_lane")]


def build(preset: str = "tiny", *overrides: str, gpus: int = 0) -> Any:
    pytest.importorskip("agentlightning.verl.daemon", reason="the seed stack is not installed (make test-seed)")
    given = (*TINY, *overrides) if preset == "tiny" else overrides
    return config.build(load(preset, given), folder=RUN, gpus=gpus, nodes=1)


@pytest.mark.seed
def test_preset_keys_arrive_under_the_same_names() -> None:
    built = build()
    assert built.data.train_batch_size == 12
    assert built.actor_rollout_ref.actor.optim.lr == 3e-4
    assert list(built.actor_rollout_ref.actor.optim.betas) == [0.9, 0.99]
    assert built.actor_rollout_ref.rollout.n == 8
    assert built.trainer.total_training_steps == 30
    assert built.trainer.default_local_dir == "/run"
    assert built.agentlightning.trace_aggregator.level == "transition"


@pytest.mark.seed
@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("verl.trainer.save_freqq=3", "save_freq"),
        ("verl.actor_rollout_ref.rollout.max_model_length=3", "max_model_len"),
        ("verl.actor_rollout_ref.actor.ppo_epoch=3", "ppo_epochs"),
        ("verl.trianer.nnodes=3", "trainer"),
    ],
)
def test_a_key_verl_does_not_have_is_refused_with_the_nearest(key: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"unknown verl key.*did you mean.*{near}"):
        build("tiny", key)


@pytest.mark.seed
def test_an_override_wins_and_free_keys_pass() -> None:
    built = build(
        "tiny", "verl.agentlightning.trace_aggregator.level=trajectory", "verl.actor_rollout_ref.actor.strategy=fsdp2"
    )
    assert built.agentlightning.trace_aggregator.level == "trajectory"
    assert built.actor_rollout_ref.actor.strategy == "fsdp2"


@pytest.mark.seed
def test_cpu_and_gpu_settings() -> None:
    cpu, gpu = build(), build("qwen", gpus=4)
    assert cpu.actor_rollout_ref.model.override_config == {"_attn_implementation": "sdpa"}
    assert gpu.actor_rollout_ref.model.override_config == {}
    assert (cpu.trainer.n_gpus_per_node, gpu.trainer.n_gpus_per_node) == (1, 4)
    assert (cpu.actor_rollout_ref.rollout.dtype, gpu.actor_rollout_ref.rollout.dtype) == ("float32", "bfloat16")
    assert gpu.actor_rollout_ref.rollout.free_cache_engine is True


@pytest.mark.seed
def test_verl_accepts_what_is_built_and_refuses_with_one_line() -> None:
    build()
    from slurmlight.train.seed import start

    start.check(build(), gpus=0, nodes=1)
    with pytest.raises(UserError, match="this machine shows"):
        start.check(build("qwen", gpus=64), gpus=64, nodes=1)
    broken = build()
    broken.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = None
    with pytest.raises(UserError, match="verl refuses this configuration"):
        start.check(broken, gpus=0, nodes=1)
