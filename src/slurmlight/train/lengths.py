"""Which tasks fit: a question whose first prompt is longer than the limit is left out and counted, never cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmlight.agents.contract import SqlTask
from slurmlight.agents.prompts import Prompts
from slurmlight.errors import UserError
from slurmlight.presets import Preset


def fitting(preset: Preset, name: str, tasks: Sequence[SqlTask]) -> tuple[list[SqlTask], str]:
    """The tasks of split ``name`` that fit data.max_prompt_length (tokens), and a line about the others ("": none).

    Raises UserError where not one fits.
    """
    limit = preset.data.max_prompt_length
    prompts = Prompts(compact=preset.agent.prompt == "compact", max_tokens=limit)
    lengths = _lengths(preset.actor_rollout_ref.model.path, [prompts.write(prompts.context(task)) for task in tasks])
    short = [task for task, length in zip(tasks, lengths, strict=True) if length <= limit]
    if tasks and not short:
        raise UserError(
            f"no question of {name} fits data.max_prompt_length={limit}: the shortest prompt takes {min(lengths)} tokens",
            "raise it, or give questions on smaller databases",
        )
    left_out = len(tasks) - len(short)
    told = f"{left_out} of {len(tasks)} questions of {name} left out: longer than data.max_prompt_length={limit} (longest: "
    return short, f"{told}{max(lengths)})" if left_out else ""


def _lengths(model: str, prompts: Sequence[list[dict[str, str]]]) -> list[int]:
    """Tokens of each prompt as the model server will see it."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(Path(model), local_files_only=True)
    rendered = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        for messages in prompts
    ]
    return [len(ids) for ids in tokenizer(rendered, add_special_tokens=False)["input_ids"]] if rendered else []
