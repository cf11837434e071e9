"""Folders that transformers 5 saved are kept from the seed stack; what it can read passes."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from slurmlight.errors import UserError
from slurmlight.modelversion import check_for_seed, check_transformers, too_new_for_seed


def folder(tmp_path: Path, tokenizer: dict[str, Any], **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return tmp_path


def test_published_folders_pass(tmp_path: Path) -> None:
    assert not too_new_for_seed(folder(tmp_path, {"tokenizer_class": "Qwen2Tokenizer"}, rope_theta=1e6))


def test_a_tokenizer_of_transformers_5_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"TokenizersBackend.*--stack current"):
        check_for_seed(folder(tmp_path, {"tokenizer_class": "TokenizersBackend"}, rope_theta=1e6))


def test_positions_that_would_be_misread_are_refused(tmp_path: Path) -> None:
    made = folder(tmp_path, {"tokenizer_class": "Qwen2Tokenizer"}, rope_parameters={"rope_theta": 1e6})
    assert "would take rope_theta=10000 for its 1e+06" in too_new_for_seed(made)
    assert not too_new_for_seed(folder(tmp_path, {}, rope_parameters={"rope_theta": 1e4}))  # read alike by both


def test_transformers_5_is_refused() -> None:
    check_transformers("4.56.2")
    with pytest.raises(UserError, match="all_special_tokens_extended"):
        check_transformers("5.0.1")


def test_what_this_environment_saves_is_told_apart(tmp_path: Path) -> None:
    """The kit's own tiny model, saved by the transformers that is installed here."""
    transformers = pytest.importorskip("transformers")
    from tests import trainbed

    trainbed.write_model(tmp_path / "models/random")
    assert bool(too_new_for_seed(tmp_path / "models/random")) is (int(transformers.__version__.split(".")[0]) >= 5)


def test_the_seed_engine_refuses_another_stack() -> None:
    from slurmlight.train.seed.engine import check_installed

    if version("agentlightning").startswith("0.3."):
        check_installed()
    else:
        with pytest.raises(UserError, match=r"agentlightning 1\.0.*seed image"):
            check_installed()
