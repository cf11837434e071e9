"""SQLite's lexical rules: enough to know first words, nesting, string literals and comments without parsing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# https://www.sqlite.org/lang_keywords.html and tokenize.c: a quote is escaped by doubling it, an unclosed block comment
# or quote runs to the end, and every character from U+0080 on belongs to a word (but a byte order mark in front is white space).
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\n\f\r\ufeff]+ | --[^\n]* | /\*(?s:.*?)(?:\*/|\Z))
  | (?P<string>[xX]?'(?:[^']|'')*')
  | (?P<name>"(?:[^"]|"")*" | `(?:[^`]|``)*` | \[[^\]]*\])
  | (?P<unclosed>['"`\[](?s:.*))
  | (?P<number>0[xX][0-9A-Fa-f]+ | (?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
  | (?P<word>[A-Za-z_\u0080-\U0010ffff][A-Za-z0-9_$\u0080-\U0010ffff]*)
  | (?P<variable>[?:@\#$][A-Za-z0-9_$:]*)
  | (?P<symbol>->>|->|\|\||<<|>>|<=|>=|<>|==|!=|(?s:.))
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Token:
    """One token: ``kind`` is string, name (quoted), number, word, variable, symbol or unclosed; ``depth`` counts open parentheses.

    ``upper`` is the text in upper case for words and the text itself for all else, so that a quoted name or a literal is
    never taken for a keyword.
    """

    kind: str
    text: str
    upper: str
    start: int
    end: int
    depth: int


def tokenize(sql: str) -> Iterator[Token]:
    """The tokens of ``sql`` without white space and comments. A parenthesis has the depth of what is around it."""
    depth = 0
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup or ""
        if kind == "space":
            continue
        text = match.group()
        if text == ")":
            depth -= 1
        yield Token(kind, text, text.upper() if kind == "word" else text, match.start(), match.end(), depth)
        if text == "(":
            depth += 1


def first_word(sql: str) -> str:
    """The first token in upper case; "" where there is none."""
    return next((token.upper for token in tokenize(sql)), "")


def top_level(sql: str) -> list[Token]:
    """The tokens outside every parenthesis."""
    return [token for token in tokenize(sql) if token.depth == 0]
