"""Supervised warm start of a small instruction model on half of the databases, in exactly the agent's own (compact) prompts.

A model that has seen the train questions has nothing left to learn from them by reinforcement, so the databases are split:
demonstrations come from one half, the questions of the other half are written to a parquet file for RL.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slurmlight.agents.contract import SqlTask
from slurmlight.agents.prompts import Message, Prompts
from slurmlight.data.parquet import write_rows
from slurmlight.data.tasks import load_tasks
from slurmlight.errors import UserError
from slurmlight.sql.execute import execute
from slurmlight.sql.schema import read_schema
from slurmlight.train.modelfolder import check, refuse_other, save

IGNORED = -100  # torch.nn.CrossEntropyLoss: positions without a target


@dataclass(frozen=True)
class Settings:
    """``repair`` is the share of demonstrations that begin with a broken query; ``longest`` cuts none, it leaves them out."""

    epochs: int = 3
    lr: float = 5e-4
    batch_size: int = 32
    repair: float = 0.25
    longest: int = 1024
    seed: int = 0


@dataclass(frozen=True)
class Demonstration:
    messages: list[Message]
    answer: str


def warm_start(base: Path, out: Path, data: Path, rest: Path, settings: Settings, say: Callable[[str], None]) -> None:
    """Train ``base`` on the first half of the databases of ``data``, save to ``out``; the other half's rows go to ``rest``.

    Raises UserError, before anything is trained, for a base that is not whole and for places that cannot be written.
    """
    check(base)
    refuse_other(out)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours, theirs = split_databases(load_tasks(data), settings.seed)
    try:
        write_rows(rest, [{"question": one.question, "db_id": one.db_id, "query": one.gold} for one in theirs])
    except OSError as error:
        raise UserError(f"cannot write {rest} ({error.strerror})", "give another --rest in a folder that exists") from None
    say(f"{len(ours)} questions on {_databases(ours)} databases to learn from, {len(theirs)} on {_databases(theirs)} for RL")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(settings.seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(base, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype=torch.float32)
    model.to(device)
    samples = [encode(tokenizer, one) for one in demonstrations(ours, settings)]
    _train(model, [one for one in samples if len(one[0]) <= settings.longest], settings, device, say)
    save(model.to(torch.bfloat16), tokenizer, out)


def split_databases(tasks: Sequence[SqlTask], seed: int) -> tuple[list[SqlTask], list[SqlTask]]:
    """Tasks on the first and on the second half of the databases in an order drawn from ``seed``."""
    names = sorted({task.db_id for task in tasks})
    random.Random(seed).shuffle(names)
    first = set(names[: len(names) // 2])
    return [task for task in tasks if task.db_id in first], [task for task in tasks if task.db_id not in first]


def demonstrations(tasks: Sequence[SqlTask], settings: Settings) -> list[Demonstration]:
    """One a task: question -> query, or broken query -> error -> query."""
    prompts, rng, found = Prompts(compact=True), random.Random(settings.seed), []
    for task in tasks:
        context = prompts.context(task)
        messages = prompts.write(context)
        if rng.random() < settings.repair and (broken := _break(task, rng)):
            result = execute(task.database, broken)
            if result.kind != "rows":
                messages = prompts.rewrite(context, broken, prompts.tell(result))
        found.append(Demonstration(messages, " ".join(task.gold.split())))
    return found


def _break(task: SqlTask, rng: random.Random) -> str:
    """The gold query with one name of the schema misspelt; "" where it holds none."""
    query = " ".join(task.gold.split())
    tables = read_schema(task.database)
    names = {table.name.lower() for table in tables} | {column.name.lower() for table in tables for column in table.columns}
    used = [match for match in re.finditer(r"\w+", query) if match[0].lower() in names]
    if not used:
        return ""
    hit = rng.choice(used)
    wrong = hit[0][:-1] if hit[0].lower().endswith("s") else rng.choice([f"{hit[0]}s", f"{hit[0]}_id", f"the_{hit[0]}"])
    return query[: hit.start()] + wrong + query[hit.end() :]


def encode(tokenizer: Any, one: Demonstration) -> tuple[list[int], list[int]]:
    """Token ids and targets; only the answer and the mark that ends the turn are learned."""
    prompt = tokenizer.apply_chat_template(one.messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    answer = tokenizer(one.answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def _train(model: Any, samples: list[Any], settings: Settings, device: str, say: Callable[[str], None]) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    steps = settings.epochs * math.ceil(len(samples) / settings.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / 30) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    rng = random.Random(settings.seed)
    model.train()
    for epoch in range(1, settings.epochs + 1):
        started, losses = time.perf_counter(), []
        for batch in _batches(samples, settings.batch_size, rng):
            ids, targets, mask = _pad(batch, device)
            with torch.autocast(device, torch.bfloat16):
                logits = model(input_ids=ids, attention_mask=mask).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().item()
        say(f"epoch {epoch}/{settings.epochs}: loss {mean:.3f}, {time.perf_counter() - started:.0f} s")


def _batches(samples: list[Any], size: int, rng: random.Random) -> list[list[Any]]:
    """Samples of like length together (less padding), batches in random order."""
    order = sorted(range(len(samples)), key=lambda place: len(samples[place][0]) + rng.random() * 64)
    batches = [[samples[place] for place in order[start : start + size]] for start in range(0, len(order), size)]
    rng.shuffle(batches)
    return batches


def _pad(batch: list[Any], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([one + [0] * (width - len(one)) for one, _ in batch], device=device)
    targets = torch.tensor([one + [IGNORED] * (width - len(one)) for _, one in batch], device=device)
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one, _ in batch], device=device)
    return ids, targets, mask


def _databases(tasks: Sequence[SqlTask]) -> int:
    return len({task.db_id for task in tasks})
