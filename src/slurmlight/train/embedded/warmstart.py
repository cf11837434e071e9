"""The tiny policy's supervised warm start: about a minute on one thread, and weakened on purpose at its end.

MODEL_DIR/            the start of RL: habits taught in the last steps (config, weights, tokenizer)
MODEL_DIR/clean/      the same training just before the habits: what RL should at least win back
MODEL_DIR/recipe.json what made them; written with the rest, in one rename
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from slurmlight.data.toy import sha256_of
from slurmlight.errors import UserError
from slurmlight.files import read_json, sync_folder, write_json
from slurmlight.presets.schema import WarmStartSection
from slurmlight.train.embedded import demos, tinymodel
from slurmlight.train.embedded.demos import Demonstrator

Progress = Callable[[int, int, float], None]  # step (from 1), steps, loss
Example = tuple[list[int], int]  # tokens of prompt and answer; how many are prompt
WARM_UP = 30  # steps
CLEAN_END_LR, HABIT_LR = 0.1, 0.2  # shares of the peak learning rate: at the end of the clean steps, during the habits
PROMPT_LOSS = 0.3  # weight of predicting the prompt too: repeated names teach copying early, in every seed
STALE_S = 6 * 3600
BUCKET = 2  # batches whose examples are sorted by length together: less padding, still mixed


def ensure_tiny_policy(
    model_dir: Path | str,
    data_dir: Path | str,
    seed: int,
    recipe: WarmStartSection,
    progress: Progress | None = None,
) -> bool:
    """Train the tiny policy into ``model_dir`` unless this very recipe already did. True where it trained.

    ``data_dir`` is a folder of ``slurmlight.data.toy``. Same seed, machine and packages: the same bytes. A kill leaves the
    old folder or the new one. Raises UserError where ``model_dir`` holds something else or cannot be written.
    """
    model_dir, data_dir = Path(model_dir).absolute(), Path(data_dir)
    wanted = _recipe(data_dir, seed, recipe)
    try:
        if read_json(model_dir / "recipe.json") == wanted and (model_dir / "model.safetensors").is_file():
            return False
        if model_dir.exists() and any(model_dir.iterdir()) and not (model_dir / "recipe.json").exists():
            raise UserError(f"{model_dir} holds something that is not a generated tiny policy", "choose another folder")
        model_dir.parent.mkdir(parents=True, exist_ok=True)
        _sweep(model_dir)
        scratch = Path(tempfile.mkdtemp(dir=model_dir.parent, prefix=f".{model_dir.name}-"))
    except OSError as error:
        raise UserError(f"cannot write the tiny policy to {model_dir} ({error.strerror})", "choose another folder") from None
    try:
        _train(scratch / "new", data_dir, seed, recipe, progress)
        write_json(scratch / "new/recipe.json", wanted)
        _swap(scratch, model_dir)
    except OSError as error:
        raise UserError(
            f"cannot write the tiny policy to {model_dir} ({error.strerror})", "make room and start again"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def _train(folder: Path, data_dir: Path, seed: int, recipe: WarmStartSection, progress: Progress | None) -> None:
    source = Demonstrator(data_dir, random.Random(f"{seed}/demonstrations"))
    tokenizer = tinymodel.build_tokenizer(source.texts())
    model = tinymodel.build_model(tokenizer, seed)
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)  # bits depend on the number of threads; two do not pay for a model of this size
    torch.use_deterministic_algorithms(True)
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        phases = ((False, recipe.clean_steps), (True, recipe.steps - recipe.clean_steps))
        step = 0
        for habits, steps in phases:
            for batch in _batches(source, tokenizer, habits, steps, recipe.batch_size):
                step += 1
                for group in optimizer.param_groups:
                    group["lr"] = recipe.lr * _schedule(step, recipe)
                loss = _step(model, optimizer, batch)
                if progress:
                    progress(step, recipe.steps, loss)
            tinymodel.save(folder if habits else folder / "clean", model, tokenizer)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def _batches(source: Demonstrator, tokenizer: PreTrainedTokenizerFast, habits: bool, steps: int, size: int):
    done = 0
    while done < steps:
        count = min(BUCKET, steps - done)
        drawn = [source.draw(habits) for _ in range(count * size)]
        examples = sorted((encode(tokenizer, one) for one in drawn), key=lambda example: len(example[0]))
        batches = [examples[start : start + size] for start in range(0, len(examples), size)]
        source.rng.shuffle(batches)
        yield from batches
        done += count


def encode(tokenizer: PreTrainedTokenizerFast, demonstration: demos.Demonstration) -> Example:
    prompt = tokenizer.encode(tinymodel.render(demonstration.prompt), add_special_tokens=False)
    answer = tokenizer.encode(demonstration.answer + tinymodel.END, add_special_tokens=False)
    return prompt + answer, len(prompt)


def _step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: list[Example]) -> float:
    """One update on the answers' mean negative log-likelihood plus PROMPT_LOSS times the prompts'."""
    longest = max(len(tokens) for tokens, _ in batch)
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in batch])
    weight = torch.zeros(len(batch), longest)
    answers, prompts = sum(len(tokens) - n for tokens, n in batch), sum(n - 1 for _, n in batch)
    for row, (tokens, prompt) in enumerate(batch):
        weight[row, 1:prompt] = PROMPT_LOSS / prompts
        weight[row, prompt : len(tokens)] = 1.0 / answers
    kept = weight[:, 1:] > 0
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # nothing looks at the padding on the right
    losses = F.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept], reduction="none")
    weights = weight[:, 1:][kept]
    loss = (losses * weights).sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _schedule(step: int, recipe: WarmStartSection) -> float:
    """Share of the peak learning rate: linear warm-up, linearly down over the clean steps, low and constant for the habits."""
    if step <= WARM_UP:
        return step / WARM_UP
    if step > recipe.clean_steps:
        return HABIT_LR
    return 1.0 - (1.0 - CLEAN_END_LR) * (step - WARM_UP) / max(1, recipe.clean_steps - WARM_UP)


def _swap(scratch: Path, model_dir: Path) -> None:
    """Put scratch/new in place of ``model_dir``; a kill between the renames leaves no folder, and the next call trains anew."""
    for folder in (scratch / "new/clean", scratch / "new"):
        sync_folder(folder)
    if model_dir.exists():
        os.rename(model_dir, scratch / "old")
    os.rename(scratch / "new", model_dir)
    sync_folder(model_dir.parent)


def _sweep(model_dir: Path) -> None:
    """Remove what a killed training left, once it is too old to be one that still runs."""
    for folder in model_dir.parent.glob(f".{model_dir.name}-*"):
        if time.time() - folder.stat().st_mtime > STALE_S:
            shutil.rmtree(folder, ignore_errors=True)


def _recipe(data_dir: Path, seed: int, recipe: WarmStartSection) -> dict[str, Any]:
    here = Path(__file__).parent
    agents = here.parent.parent / "agents"
    sources = [here / "tinymodel.py", here / "demos.py", here / "warmstart.py", agents / "prompts.py"]
    try:
        data = hashlib.sha256((data_dir / "warm.parquet").read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{data_dir}/warm.parquet cannot be read ({error.strerror})", "run `slurmlight data toy`") from None
    return {
        "seed": seed,
        "warmstart": {name: getattr(recipe, name) for name in recipe.__struct_fields__},
        "data": data,
        "sources": sha256_of(sources),
        "torch": torch.__version__,
    }
