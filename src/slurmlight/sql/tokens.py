"""SQLite's lexical rules: enough to know first words, nesting, string literals and comments without parsing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod

# https://www.sqlite.org/lang_keywords.html and tokenize.c: a quote is escaped by doubling it, an unclosed block comment
# or quote runs to the end, every character from U+0080 on belongs to a word (but a byte order mark is white space).
_TOKEN = r"""
    (?P<space>[ \t\n\f\r\ufeff]+ | --[^\n]* | /\*(?s:.*?)(?:\*/|\Z))
  | (?P<string>[xX]?'(?:[^']|'')*')
  | (?P<name>"(?:[^"]|"")*" | `(?:[^`]|``)*` | \[[^\]]*\])
  | (?P<unclosed>['"`\[](?s:.*))
  | (?P<number>0[xX][0-9A-Fa-f]+ | (?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
  | (?P<word>[A-Za-z_\u0080-\U0010ffff][A-Za-z0-9_$\u0080-\U0010ffff]*)
  | (?P<variable>[?:@\#$][A-Za-z0-9_$:]*)
  | (?P<symbol>->>|->|\|\||<<|>>|<=|>=|<>|==|!=|(?s:.))
"""


@cache
def _pattern() -> re.Pattern[str]:  # compiled when first needed: a tenth of the executor's cold start
    return re.compile(_TOKEN, re.VERBOSE)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of kind string, name (quoted), number, word, variable, symbol or unclosed, inside ``depth`` parentheses.

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
    for match in _pattern().finditer(sql):
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


_QUOTED = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`)""")


def canonical(sql: str) -> str:
    """A text that only queries of the same tokens share: blanks, case outside quotes and one last ";" do not count.

    Cheap (a few microseconds), so it gives up and returns ``sql`` where that would take a tokenizer.
    """
    one_line = sql.replace("\n", " ").replace("\t", " ").replace("\r", " ")
    if "--" in sql or "/*" in sql or "[" in sql or not (one_line.isascii() and one_line.isprintable()):
        return sql
    parts = _QUOTED.split(sql)
    for at in range(0, len(parts), 2):
        part = parts[at]
        # a blank next to a quote stays: x'00' is a BLOB, x '00' is a column and its alias
        blanks = part[:1].isspace(), part[-1:].isspace()
        text = " ".join(part.lower().split()).replace(" ,", ",").replace(", ", ",").replace(" )", ")").replace("( ", "(")
        parts[at] = f"{' ' * blanks[0]}{text}{' ' * blanks[1]}" if text else part
    return "".join(parts).strip().removesuffix(";").rstrip()


def expansions(sql: str) -> int:
    """An upper bound of how often SQLite copies the body of some common table expression: nested uses multiply."""
    tokens = list(tokenize(sql))
    uses: dict[str, int] = {}
    for at, (token, following) in enumerate(pairwise(tokens)):
        if token.upper == "AS" and following.text.upper() in ("(", "NOT", "MATERIALIZED"):
            before, written = at - 1, -1  # the definition itself is counted below, where no column list follows the name
            if tokens[before].text == ")":  # name(column, ...) AS (
                while before > 0 and tokens[before].text != "(":
                    before -= 1
                before, written = before - 1, 0
            uses[_bare(tokens[max(0, before)])] = written
    for token, following in pairwise(tokens):
        if following.text not in (".", "(") and (name := _bare(token)) in uses:
            uses[name] += 1
    return prod(max(1, count) for count in uses.values())


def _bare(token: Token) -> str:
    return token.text.strip('"`[]').lower()
