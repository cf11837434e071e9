"""The rules of fingerprints.toml: how known failures look in a log, what they are called and what to do about them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

Kind = Literal["cause", "slurm", "late", "error", "end"]


@dataclass(frozen=True)
class Fingerprint:
    """A regular expression and the longest text that every match holds, in lower case: a quick no for most lines."""

    pattern: re.Pattern[str]
    literal: str

    def search(self, line: str, lowered: str) -> re.Match[str] | None:
        return self.pattern.search(line) if self.literal in lowered else None


@dataclass(frozen=True)
class Rule:
    """One known failure. A line matches where one of ``any`` is found in it; their named groups may stand in ``detail`` and
    ``action``, ``{port}`` in ``detail`` is the port number of the line.

    ``kind`` says how it competes with others: ``cause``: the first one wins. ``slurm``: likewise, and training cannot outlive
    it. ``late``: Slurm reports it after its consequences, so it explains symptoms that stand before it. ``error``, ``end``:
    something died, without saying why: only where nothing else is found. ``symptom``: an earlier uncaught error or any
    ``late`` cause explains it. ``requeue``: whether coming back can help. ``adjust``: preset keys to change by that much.
    """

    cause: str
    any: tuple[Fingerprint, ...]
    action: str
    kind: Kind = "cause"
    detail: str = ""
    requeue: bool = True
    symptom: bool = False
    adjust: dict[str, float] = field(default_factory=dict)

    def search(self, line: str, lowered: str) -> re.Match[str] | None:
        return next((match for one in self.any if (match := one.search(line, lowered))), None)


@cache
def table() -> tuple[Rule, ...]:
    """All rules; of several that match one line the first counts."""
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(_rule(entry) for entry in found["rule"])


@cache
def literals() -> tuple[str, ...]:
    """What a line must hold, in lower case, for any rule to match it."""
    return tuple({one.literal: None for rule in table() for one in rule.any})


def _rule(entry: dict[str, Any]) -> Rule:
    marks = tuple(Fingerprint(re.compile(text, re.IGNORECASE), literal(text)) for text in entry.pop("any"))
    return Rule(any=marks, **entry)


def literal(pattern: str) -> str:
    """The longest plain text in a pattern, outside groups, classes and optional parts; in lower case."""
    plain, before = pattern, ""
    while plain != before:  # innermost groups first
        before, plain = plain, re.sub(r"\((?:[^()\\]|\\.)*\)[?*+]?", "\0", plain)
    plain = re.sub(r"\[[^\]]*\][?*+]?|(?<!\\)\[.*?\]", "\0", re.sub(r"\\[\[\]]", "\0", plain))
    plain = re.sub(r"\\.[?*+]?|.[?*]|\{[\d,]*\}|[.^$+]", "\0", plain)
    return max(plain.split("\0"), key=len).lower()
