"""Checkpoints as servable folders: whole, of the right base, and not the base itself. verl's merger is a stand-in here."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slurmlight import presets
from slurmlight.agents.contract import Channel
from slurmlight.errors import UserError
from slurmlight.evaluate import merge, serve
from slurmlight.evaluate.serve import Servers
from slurmlight.train.checkpoints import inspect

CONFIG = {"model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16}


def model(folder: Path, value: float = 1.0, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {"a": torch.full((4, 4), value, dtype=dtype), "b": torch.arange(4, dtype=dtype)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def step(run: Path, number: int = 5, whole_model: bool = False) -> Path:
    """A complete step folder of one GPU; with ``whole_model`` as the embedded engine writes it."""
    path = run / f"global_step_{number}"
    hf = path / "actor/huggingface"
    hf.mkdir(parents=True)
    for part in ("model", "optim", "extra_state"):
        torch.save({"x": torch.ones(2)}, path / f"actor/{part}_world_size_1_rank_0.pt")
    torch.save({}, path / "data.pt")
    (hf / "config.json").write_text(json.dumps(CONFIG))
    if whole_model:
        model(hf, 2.0)
    return path


MERGER = """
import shutil, sys
from pathlib import Path
arguments = dict(zip(sys.argv[4::2], sys.argv[5::2]))
assert sys.argv[1:4] == ["merge", "--backend", "fsdp"], sys.argv
made = Path(arguments["--local_dir"], "merged")
if not made.exists():
    sys.exit("no shards here")
shutil.copytree(made, arguments["--target_dir"])
"""


@pytest.fixture
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package verl whose merger copies actor/merged, so that its result can be chosen."""
    package = tmp_path / "site/verl/model_merger"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(MERGER)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def test_an_embedded_checkpoint_needs_no_merge(tmp_path: Path) -> None:
    path = step(tmp_path / "run", whole_model=True)
    assert merge.model_folder(inspect(5, path), model(tmp_path / "base")) == path / "actor/huggingface"


@pytest.mark.usefixtures("verl")
def test_shards_are_merged_once_beside_the_checkpoint(tmp_path: Path) -> None:
    path, base = step(tmp_path / "run"), model(tmp_path / "base")
    model(path / "actor/merged", 3.0, torch.bfloat16)
    found = merge.model_folder(inspect(5, path), base)
    assert found == tmp_path / "run/merged/global_step_5"
    assert load_file(found / "model.safetensors")["a"][0, 0] == 3.0
    shutil.rmtree(path / "actor/merged")
    assert merge.model_folder(inspect(5, path), base) == found, "a second call merges nothing"


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_k16_a_merge_that_gives_the_base_back_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    path, base = step(tmp_path / "run"), model(tmp_path / "base")
    model(path / "actor/merged", 1.0, dtype)
    with pytest.raises(UserError, match="equal the base model"):
        merge.model_folder(inspect(5, path), base)
    assert not list((tmp_path / "run/merged").iterdir()), "nothing is left that could be served"


@pytest.mark.usefixtures("verl")
def test_a_merger_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path, base = step(tmp_path / "run"), model(tmp_path / "base")
    with pytest.raises(UserError, match="merger ended with 1: no shards here"):
        merge.model_folder(inspect(5, path), base)
    assert not list((tmp_path / "run/merged").iterdir())


def test_without_verl_shards_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="verl is not installed"):
        merge.model_folder(inspect(5, step(tmp_path / "run")), model(tmp_path / "base"))


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    path = step(tmp_path / "run", whole_model=True)
    shard = path / "actor/model_world_size_1_rank_0.pt"
    shard.write_bytes(shard.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"not complete: .*torn"):
        merge.model_folder(inspect(5, path), model(tmp_path / "base"))


def test_a_checkpoint_of_another_base_model_is_refused(tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    (base / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 16}))
    with pytest.raises(UserError, match="hidden_size 16 -> 8"):
        merge.model_folder(inspect(5, step(tmp_path / "run", whole_model=True)), base)


def test_one_changed_weight_makes_another_model(tmp_path: Path) -> None:
    base, other = model(tmp_path / "base"), model(tmp_path / "other")
    assert merge.same_weights(base, other)
    weights = load_file(other / "model.safetensors")
    weights["b"][3] += 0.5
    save_file(weights, other / "model.safetensors")
    assert not merge.same_weights(base, other)


def test_vllm_gets_one_engine_a_gpu_group_and_no_key_on_its_command_line(tmp_path: Path) -> None:
    preset = presets.load("qwen")
    assert serve.gpu_groups(preset, {"CUDA_VISIBLE_DEVICES": "4,5"}) == ["4", "5"]
    assert serve.gpu_groups(preset, {}) == ["0", "1", "2", "3"]
    two = presets.load("qwen", ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"])
    assert serve.gpu_groups(two, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == ["0,1", "2,3"]
    with pytest.raises(UserError, match="1 GPUs here, an engine of this run needs 2"):
        serve.gpu_groups(two, {"CUDA_VISIBLE_DEVICES": "3"})
    words = serve.vllm_command(tmp_path, preset, 8123, "0")
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags = dict(zip(words[3:-1:2], words[4:-1:2], strict=False))
    assert (flags["--port"], flags["--host"], flags["--model"]) == ("8123", "127.0.0.1", str(tmp_path))
    assert flags["--max-model-len"] == str(preset.data.max_prompt_length + preset.data.max_response_length)
    assert "--api-key" not in words


def test_episodes_go_to_the_least_busy_server() -> None:
    one, two = Channel("http://1", "", "m"), Channel("http://2", "", "m")
    servers = Servers([one, two])
    with servers.borrow() as first, servers.borrow() as second:
        assert {first, second} == {one, two}
        with servers.borrow():
            pass
    assert servers.busy == {one: 0, two: 0}
