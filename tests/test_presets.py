"""Presets: exact values, typed overrides, and combinations refused with their reason (cases O-01 to O-11, O-14)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from slurmlight import presets
from slurmlight.errors import UserError
from slurmlight.presets.describe import keys, value
from slurmlight.tracking.swanlab_mode import choose_mode, run_id
from tests.shared import REPOSITORY

DOCUMENTED_RUN: dict[str, Any] = {
    "engine.name": "verl",
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    "data.train_files": "data/train_spider.parquet",
    "data.val_files": "data/test_dev_500.parquet",
    "data.train_batch_size": 32,
    "data.max_prompt_length": 4096,
    "data.max_response_length": 2048,
    "data.truncation": "error",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.multi_turn.format": "hermes",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
    "actor_rollout_ref.rollout.enable_auto_tool_choice": True,
    "actor_rollout_ref.rollout.tool_call_parser": "hermes",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.3,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.model.path": "models/Qwen3-1.7B",
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "job.gpus": 4,
    "job.nodes": 1,
    "trainer.val_before_train": True,
    "trainer.logger": ["console", "swanlab"],
    "trainer.project_name": "Qwen3-1.7B-AgenticRL",
    "trainer.experiment_name": "spider",
    "trainer.test_freq": 32,
    "trainer.total_epochs": 2,
    "trainer.total_training_steps": None,
    "trainer.save_freq": 10,
    "trainer.resume_mode": "auto",
    "runner.n_runners": 32,
}


def refused(*overrides: str, preset: str = "qwen") -> str:
    with pytest.raises(UserError) as raised:
        presets.load(preset, overrides)
    assert raised.value.exit_code == 2 and "\n" not in str(raised.value)
    return str(raised.value)


def test_qwen_carries_the_documented_run_exactly() -> None:
    preset = presets.load("qwen")
    assert {key: value(preset, key) for key in DOCUMENTED_RUN} == DOCUMENTED_RUN


def test_fast_is_qwen_for_one_step_on_a_hundred_rows() -> None:
    fast, qwen = presets.load("fast"), presets.load("qwen")
    changed = {key.name for key in keys() if value(fast, key.name) != value(qwen, key.name)}
    assert changed == {
        *("name", "about", "job.time", "data.val_files"),
        *("trainer.total_training_steps", "trainer.total_epochs", "trainer.save_freq"),
    }
    assert (fast.data.val_files, fast.trainer.total_training_steps) == ("data/test_dev.parquet", 1)


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_survives_its_json(name: str) -> None:
    preset = presets.load(name)
    assert presets.from_json(json.loads(json.dumps(presets.to_json(preset)))) == preset


def test_o01_an_unknown_preset_lists_all_and_suggests_the_nearest() -> None:
    told = refused(preset="qwen-1.5")
    assert "did you mean qwen" in told and all(name in told for name in presets.names())


def test_o02_an_unknown_key_suggests_the_nearest() -> None:
    told = refused("actor_rollout_ref.actor.optimm.lr=1e-6")
    assert "optimm" in told and "did you mean optim" in told and "actor_rollout_ref.actor" in told


def test_o03_numbers_stay_numbers(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('base = "qwen"\n[actor_rollout_ref.actor.optim]\nlr = 1e-6\n')
    for preset in (presets.load(str(own)), presets.load("qwen", ["actor_rollout_ref.actor.optim.lr=1e-6"])):
        assert preset.actor_rollout_ref.actor.optim.lr == 0.000001
    assert presets.load("qwen", ["verl.trainer.nccl_timeout=600"]).verl == {"trainer.nccl_timeout": 600}


def test_o04_a_batch_below_the_mini_batch() -> None:
    told = refused("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    assert "train_batch_size=16" in told and "ppo_mini_batch_size=32" in told


def test_o05_rows_that_do_not_divide_among_the_gpus() -> None:
    told = refused("data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6", "actor_rollout_ref.rollout.n=3")
    assert "18 is not divisible by 4" in told


def test_o05_rows_that_do_not_divide_into_micro_batches() -> None:
    told = refused("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5")
    assert "32 rows is not divisible by actor.ppo_micro_batch_size_per_gpu=5" in told


def test_o06_grpo_needs_a_group() -> None:
    told = refused("actor_rollout_ref.rollout.n=1")
    assert "n=1" in told and "grpo" in told and "2 or more" in told


def test_o07_weights_that_would_never_be_synced() -> None:
    told = refused("actor_rollout_ref.rollout.free_cache_engine=False")
    assert "free_cache_engine=False" in told and "verl 0.5.0" in told and "base" in told
    assert presets.load("qwen", ["engine.stack=current", "actor_rollout_ref.rollout.free_cache_engine=False"])


def test_o08_lora_on_the_seed_stack_names_the_pair() -> None:
    told = refused("actor_rollout_ref.model.lora_rank=8")
    assert "verl 0.5.0" in told and "vllm 0.10.2" in told
    assert presets.load("qwen", ["engine.stack=current", "actor_rollout_ref.model.lora_rank=8"])


def test_o09_requeue_without_checkpoints() -> None:
    assert "nothing to resume from" in refused("trainer.save_freq=-1")
    assert presets.load("qwen", ["trainer.save_freq=-1", "job.requeue=false"])


def test_o10_a_signal_that_would_come_at_the_start() -> None:
    told = refused("job.time=2", "job.signal_lead_s=120")
    assert "job.time=2" in told and "120" in told


def test_o11_a_run_id_that_swanlab_refuses(tmp_path: Path) -> None:
    logger = ["console", "swanlab"]
    with pytest.raises(UserError, match=r"21 characters.*the kit makes one"):
        choose_mode(logger, {"SWANLAB_RUN_ID": "my-run"})
    with pytest.raises(UserError, match="cloud mode only"):
        choose_mode(logger, {"SWANLAB_MODE": "offline", "SWANLAB_RESUME": "must"})
    made = run_id(tmp_path, {})
    assert len(made) == 21 and set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789")
    assert run_id(tmp_path, {}) == made, "kept in the run folder"


def test_high_gpu_memory_on_the_seed_stack_warns() -> None:
    (unproven,) = presets.warnings(presets.load("qwen"))
    assert "on a GPU it has not been run yet" in unproven
    warning, _ = presets.warnings(presets.load("qwen", ["actor_rollout_ref.rollout.gpu_memory_utilization=0.8"]))
    assert "0.8" in warning and "step 55" in warning


def test_what_was_not_run_on_gpus_yet_is_said_of_presets_with_gpus_only() -> None:
    for name in ("qwen", "llama", "fast", "smol"):
        (unproven,) = presets.warnings(presets.load(name, ["engine.stack=current"]))
        assert "finished on one and two H200s of one node" in unproven and "several nodes" in unproven
    assert not presets.warnings(presets.load("tiny-verl"))
    assert not presets.warnings(presets.load("tiny-verl", ["engine.stack=seed"]))


def test_credit_that_verl_0_5_cannot_give_is_refused_on_the_seed_stack() -> None:
    with pytest.raises(UserError, match="one advantage for all calls"):
        presets.load("qwen", ["credit.kind=last"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.save_freq=often", ("trainer.save_freq", "often", "default 10")),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=1.5", ("gpu_memory_utilization", "1.5", "0.6")),
        ("data.truncation=cut", ("data.truncation", "cut", "middle")),
        ("trainer.logger.x=1", ("trainer.logger.x", "not a section")),
        ("trainer=1", ("trainer",)),
        ("nonsense", ("has no value", "key=value")),
        ("job.time=soon", ("soon", "HH:MM:SS")),
        ("=5", ("has no value",)),
        ("actor_rollout_ref.actor.optim.betas=[5,-2]", ("actor_rollout_ref.actor.optim.betas", "5", "< 1")),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.0]", ("actor_rollout_ref.actor.optim.betas", "< 1")),
        ("engine.seed=99999999999999999999999", ("engine.seed", "2147483647")),
        ("actor_rollout_ref.actor.optim.lr=inf", ("actor_rollout_ref.actor.optim.lr=inf", "finite")),
        ("actor_rollout_ref.actor.optim.lr=1e999", ("actor_rollout_ref.actor.optim.lr=inf", "finite")),
        ("verl.actor_rollout_ref.actor.clip_ratio_c=inf", ("verl.actor_rollout_ref.actor.clip_ratio_c=inf", "finite")),
        ('reward=[{name="execution_match",weight=nan}]', ("reward[0].weight=nan",)),
        ("job.mem=x", ("job.mem='x'", "64G")),
        ("job.mem=-4G", ("job.mem='-4G'", "64G")),
        ("job.time=99999999999", ("job.time=99999999999", "UNLIMITED")),
        ("data.train_files=", ("data.train_files=''", "length >= 1")),
        ("actor_rollout_ref.model.path=", ("actor_rollout_ref.model.path=''", "length >= 1")),
    ],
)
def test_a_wrong_value_is_told_with_the_rule_and_the_default(override: str, words: tuple[str, ...]) -> None:
    told = refused(override)
    assert [word for word in words if word not in told] == []


def test_sbatchs_spellings_of_memory_and_time_are_taken() -> None:
    for mem in ("", "0", "4096", "64G", "64g", "1TB"):
        assert presets.load("tiny", [f"job.mem={mem}"]).job.mem == mem
    for time in ("30", "7-00:00:00", "24855-00:00:00", "UNLIMITED"):
        assert presets.load("tiny", [f"job.time={time}"]).job.time == time


def test_a_preset_file_with_faults_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    assert "does not exist" in refused(preset=str(own))
    own.write_text("base = ")
    assert "is not TOML" in refused(preset=str(own))
    own.write_bytes(b"\xff\xfe")
    assert "is not TOML" in refused(preset=str(own))
    own.write_text('name = "x"\n')
    assert "has no" in refused(preset=str(own))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("x = 1979-05-27", "unknown key 'x'"),
        ("about = 1979-05-27", "expected `str`, got `date`"),
        (f"x = {'[' * 2000}{']' * 2000}", "nested too deep"),
        (f"{'a.' * 2000}a = 1", "nested too deep"),
    ],
    ids=["date", "date of a key", "lists", "tables"],
)
def test_a_preset_file_with_strange_toml_is_refused(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "own.toml").write_text(f'base = "tiny"\n{line}\n')
    assert told in refused(preset=str(tmp_path / "own.toml"))


def test_an_override_that_is_nested_too_deep_is_refused() -> None:
    assert "nested too deep" in refused(f"verl.x={'[' * 2000}{']' * 2000}")


def test_a_preset_file_that_is_there_and_cannot_be_read_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "own.toml").touch()
    monkeypatch.setattr(Path, "read_text", refuse)
    assert "cannot be read (Permission denied)" in refused(preset=str(tmp_path / "own.toml"))


@pytest.mark.parametrize("base", ['"qwenn"', '"own.toml"', "5", '"folder.toml"'])
def test_a_preset_file_on_a_wrong_base_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "own.toml").write_text(f"base = {base}\n")
    assert base.strip('"') in refused(preset="own.toml")


def test_every_key_says_what_it_means_and_where_it_comes_from() -> None:
    assert not [key.name for key in keys() if not key.about or "[" not in key.about]


def cli(*arguments: str) -> str:
    from slurmlight.cli.presets import register

    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("name", presets.names())
def test_the_printed_preset_is_a_preset(name: str, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(cli(name))
    assert presets.load(str(own)) == presets.load(name)


def test_the_command_lists_presets_and_documents_keys() -> None:
    assert set(json.loads(cli("--json"))) == set(presets.names())
    assert all(name in cli() for name in presets.names())
    rows = {row["name"]: row for row in json.loads(cli("qwen", "--json"))}
    assert rows["trainer.save_freq"]["value"] == 10 and "checkpoints" in rows["trainer.save_freq"]["about"]


def test_the_documentation_is_that_of_this_schema() -> None:
    assert (REPOSITORY / "docs/presets.md").read_text() == cli("--markdown")
