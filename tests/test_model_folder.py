"""Model folders are judged before GPUs are taken: torn shards, missing tokenizers, names that lead nowhere."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from slurmlight.errors import UserError
from slurmlight.train import modelfolder
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
