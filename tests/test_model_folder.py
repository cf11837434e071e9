"""Model folders are judged before GPUs are taken: torn shards, missing tokenizers, names that lead nowhere."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from slurmlight.cli import build
from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.train import modelfolder, supervised
from slurmlight.train.embedded import prepare
from slurmlight.train.shapes import random_model


def shard(path: Path, cut: int = 0) -> None:
    """A safetensors file with one tensor of 16 bytes, ``cut`` bytes short."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes((struct.pack("<Q", len(header)) + header + bytes(16))[: None if not cut else -cut])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    shard(tmp_path / "a.safetensors")
    shard(tmp_path / "b.safetensors")
    (tmp_path / modelfolder.INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    return tmp_path


def test_a_torn_shard_is_named(folder: Path) -> None:
    shard(folder / "b.safetensors", cut=3)
    with pytest.raises(UserError, match=r"b\.safetensors is torn; run .* again"):
        modelfolder.check(folder)


def test_a_shard_of_the_index_that_is_not_there_is_named(folder: Path) -> None:
    (folder / "a.safetensors").unlink()
    with pytest.raises(UserError, match=r"a\.safetensors is missing"):
        modelfolder.check(folder)


def test_no_tokenizer(folder: Path) -> None:
    with pytest.raises(UserError, match="has no tokenizer"):
        modelfolder.check(folder)


@pytest.mark.parametrize("name", ["config.json", "weights"])
def test_an_empty_folder_says_what_it_lacks(folder: Path, name: str) -> None:
    for path in folder.iterdir():
        if (path.name == name) or (name == "weights" and path.suffix == ".safetensors") or path.name == modelfolder.INDEX:
            path.unlink()
    with pytest.raises(UserError, match=r"no readable config\.json|no \*\.safetensors"):
        modelfolder.check(folder)


def test_a_random_model_of_a_shape_is_a_good_folder_and_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    assert random_model("qwen3-tiny", tmp_path / "m") == 115_136
    assert modelfolder.check(tmp_path / "m")[0].startswith("Qwen3ForCausalLM, 1 weight file(s)")
    with pytest.raises(UserError, match=r"unknown shape 'qwen3-2b'; did you mean"):
        random_model("qwen3-2b", tmp_path / "n")


def test_a_turn_that_never_ends_is_refused(tmp_path: Path) -> None:
    random_model("qwen3-tiny", tmp_path / "m")
    settings = tmp_path / "m" / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    with pytest.raises(UserError, match="a turn ends without the tokenizer's eos"):
        modelfolder.check(tmp_path / "m")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"device": "foo"}, "--device foo cannot be used here"),
        ({"device": "meta"}, "--device meta cannot be used here"),
        ({"tokenizer_of": Path("/nope")}, "--tokenizer /nope is not a folder"),
        ({"tokenizer_of": Path("empty")}, "the tokenizer of empty cannot be read"),
        ({"folder": Path("file")}, r"cannot write a model to file \(Not a directory\)"),
        ({"folder": Path("file/m")}, "cannot write a model to file/m"),
        ({"folder": Path("x" * 300)}, "cannot write a model to xxx.*too long"),
        ({"folder": Path("mine")}, "mine holds something that is not a model"),
    ],
)
def test_bad_input_of_a_random_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("empty").mkdir()
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("")
    with pytest.raises(UserError, match=told) as caught:
        random_model(**({"like": "qwen3-tiny", "folder": Path("m")} | arguments))
    assert "\n" not in str(caught.value)
    assert not Path("m").exists() and Path("mine/thesis.txt").exists()


def test_cuda_where_there_is_none_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "zeros", lacking)
    with pytest.raises(UserError, match=r"--device cuda cannot be used here \(Torch not compiled"):
        random_model("qwen3-tiny", tmp_path / "m", device="cuda")


@pytest.mark.parametrize("weights", ["3", '{"w": 3}'])
def test_an_index_that_names_no_files_is_told(folder: Path, weights: str) -> None:
    (folder / modelfolder.INDEX).write_text(f'{{"weight_map": {weights}}}')
    with pytest.raises(UserError, match="has no weight_map"):
        modelfolder.check(folder)


def test_a_folder_whose_files_cannot_be_read_is_told(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(UserError, match=r"config\.json cannot be read \(Is a directory\)"):
        modelfolder.check(folder)
    with pytest.raises(UserError, match=r"cannot be read .*too long"):
        modelfolder.check(folder / ("x" * 300))


def test_a_warm_start_is_refused_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    arguments = (tmp_path / "out", tmp_path / "train.parquet", tmp_path / "file/rest.parquet", supervised.Settings(), print)
    with pytest.raises(UserError, match=r"nope has no readable config\.json"):
        supervised.warm_start(tmp_path / "nope", *arguments)
    monkeypatch.setattr(supervised, "check", lambda _: [])
    monkeypatch.setattr(supervised, "load_tasks", lambda _: [])
    with pytest.raises(UserError, match=r"cannot write .*file/rest\.parquet \(Not a directory\)"):
        supervised.warm_start(tmp_path / "nope", *arguments)


def test_folders_are_where_the_presets_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    monkeypatch.setattr(modelfolder, "check", lambda folder: written.append(folder) or [])
    monkeypatch.setattr(modelfolder, "fetch", lambda name, folder: "a hub")
    monkeypatch.setattr(modelfolder, "smol", lambda folder: None)
    made: list[Preset] = []
    monkeypatch.setattr(prepare, "make_tiny", lambda preset, _: made.append(preset))
    for command in (["fetch", "Qwen/Qwen3-1.7B"], ["tiny"], ["smol"], ["fetch", "Qwen/Qwen3-1.7B", "elsewhere"]):
        assert CliRunner().invoke(build(), ["model", *command], catch_exceptions=False).exit_code == 0
    models = tmp_path / "models"
    assert written == [models / "Qwen3-1.7B", models / "tiny", models / "SmolLM2-135M-Instruct", Path("elsewhere")]
    assert made[0].data.train_files == f"{tmp_path}/data/toy/train.parquet"
