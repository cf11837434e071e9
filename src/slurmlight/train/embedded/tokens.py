"""Chat messages to token ids and back by the files of a model folder, without transformers: a server up in a second.

Source of what the template may use: transformers' chat_template_utils (sandbox, trimmed blocks, loop controls).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from slurmlight.errors import UserError


class ChatTokens:
    """The tokenizer and chat template of ``folder``. Raises UserError where either is missing or broken."""

    def __init__(self, folder: Path) -> None:
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.names = _special_names(folder)
            self.template = _environment().from_string(_template_text(folder))
        except (OSError, ValueError, KeyError, TemplateError) as error:
            raise UserError(
                f"{folder} has no usable tokenizer and chat template ({error})", "save the tokenizer there"
            ) from None
        except Exception as error:  # tokenizers raises a bare Exception for a missing or broken file
            raise UserError(f"{folder}/tokenizer.json cannot be read ({error})", "save the tokenizer there") from None
        self.end_tokens = frozenset(_end_tokens(folder, self.tokenizer, self.names))

    def encode(self, messages: Sequence[Any], options: Mapping[str, Any]) -> list[int]:
        """The prompt of ``messages``; ``options`` go to the template. Raises jinja2's TemplateError where it refuses them."""
        text = self.template.render(messages=messages, add_generation_prompt=True, **{**self.names, **options})
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def name(self, token: int) -> str:
        return self.tokenizer.id_to_token(token) or ""


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _template_text(folder: Path) -> str:
    """chat_template.jinja (transformers 5), else the entry in tokenizer_config.json (before)."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    return json.loads((folder / "tokenizer_config.json").read_bytes())["chat_template"]


def _special_names(folder: Path) -> dict[str, str]:
    """bos_token, eos_token ... as text, for the template."""
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    names = {key: value for key, value in config.items() if key.endswith("_token") and value}
    return {key: value["content"] if isinstance(value, dict) else value for key, value in names.items() if value is not True}


def _end_tokens(folder: Path, tokenizer: Tokenizer, names: Mapping[str, str]) -> Iterator[int]:
    if (end := tokenizer.token_to_id(names.get("eos_token", ""))) is not None:
        yield end
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            ends = json.loads((folder / name).read_bytes()).get("eos_token_id")
            yield from [ends] if isinstance(ends, int) else ends or []
