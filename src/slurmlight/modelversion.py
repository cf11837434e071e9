"""transformers 5 and the seed stack: vLLM 0.10 breaks on it, and 4.56 cannot read a folder that it saved, or misreads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurmlight.errors import UserError
from slurmlight.files import read_json

DEFAULT_THETA = 10_000.0  # what transformers 4 takes where it finds no rope_theta


def too_new_for_seed(folder: Path) -> str:
    """Why the seed stack must not train ``folder``; "" where it may. Reads two small JSON files."""
    config, tokenizer = (_table(folder / name) for name in ("config.json", "tokenizer_config.json"))
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        return "its tokenizer was saved by transformers 5 (TokenizersBackend), which transformers 4.56 cannot load"
    theta = _rope_theta(config.get("rope_parameters"))
    if theta != DEFAULT_THETA and "rope_theta" not in config:
        return (
            f"it was saved by transformers 5: transformers 4.56 would take rope_theta=10000 for its {theta:g}, without a word"
        )
    return ""


def check_for_seed(folder: Path) -> None:
    """Raises UserError where the seed stack must not train ``folder``."""
    if why := too_new_for_seed(folder):
        raise UserError(f"model folder {folder}: {why}", "save it with transformers 4 (the seed image), or use --stack current")


def check_transformers(installed: str) -> None:
    """Raises UserError where the version ``installed`` breaks vLLM 0.10."""
    if int(installed.split(".")[0]) >= 5:
        raise UserError(
            f"transformers {installed} with vllm 0.10.2: the engine dies at start (no attribute all_special_tokens_extended)",
            "install docker/seed/requirements.lock, which has 4.56.2",
        )


def _table(path: Path) -> dict[str, Any]:
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def _rope_theta(parameters: Any) -> float:
    value = parameters.get("rope_theta", DEFAULT_THETA) if isinstance(parameters, dict) else DEFAULT_THETA
    return float(value)
