"""Slurm's node lists (``a800-[1-3,7]``) -> names in order. Pure; malformed text is an error, never a shorter list."""

from __future__ import annotations

import itertools
import re

from slurmlight.errors import UserError

LIMIT = 65536  # Slurm's own bound on the hosts of one expression (hostlist.c, MAX_RANGE)
_NOBODY = ("", "(null)", "None", "None assigned", "n/a", "N/A")
_NUMBERS = re.compile(r"^(\d+)(?:-(\d+))?$")
_NAME = re.compile(r"^[A-Za-z0-9._-]+$")


class NodeListError(UserError):
    """The text is no node list."""


def expand(text: str) -> tuple[str, ...]:
    """The nodes ``text`` stands for: zero padding kept, order kept, of several ranges the last varies fastest.

    Slurm's ways of saying "none" (``None assigned``, ``(null)``, empty) give no nodes. Raises NodeListError.
    """
    text = text.strip()
    if text in _NOBODY:
        return ()
    nodes = tuple(itertools.chain.from_iterable(_host(part, text) for part in split(text)))
    if len(nodes) > LIMIT:
        raise NodeListError(f"'{text[:80]}' names more than {LIMIT} nodes", "check where it comes from")
    return nodes


def split(text: str) -> list[str]:
    """``text`` at the commas that are outside brackets. Raises NodeListError for brackets that do not match."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise _bad(text)
        if letter == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    if depth:
        raise _bad(text)
    return [*parts, text[start:]]


def _host(part: str, whole: str) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # name, range, name, range, ..., name
    choices = [_range(piece, whole) if at % 2 else [piece] for at, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > LIMIT:
        raise _bad(whole)
    names = ["".join(name) for name in itertools.product(*choices)]
    if not all(_NAME.match(name) for name in names):
        raise _bad(whole)
    return names


def _range(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = _NUMBERS.match(item)
        if not match:
            raise _bad(whole)
        low, high = match[1], match[2] or match[1]
        if not int(low) <= int(high) < int(low) + LIMIT:
            raise _bad(whole)
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return numbers


def _bad(text: str) -> NodeListError:
    return NodeListError(f"'{text[:200]}' is not a node list", "expected names such as a800-[1-3,7],cpu5")
