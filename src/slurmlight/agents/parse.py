"""A completion's text -> the SQL in it: survives think blocks, fences of every kind, prose and trailing semicolons."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Parsed:
    """``sql`` is "" exactly where ``failure`` names why there is none."""

    sql: str
    failure: str = ""


EMPTY = "the answer is empty"
ONLY_THINKING = "the answer ended inside a <think> block"
NO_SQL = "the answer holds no SQL query"

_THINK = re.compile(r"(</?think>)", re.IGNORECASE)
_FENCE = re.compile(r"(?P<mark>```|~~~)(?P<body>.*?)(?:(?P=mark)|\Z)", re.DOTALL)
_LABEL = re.compile(r"[ \t]*(?P<label>sqlite3?|sql|mysql|postgres(?:ql)?|plsql|text|plaintext|query)\b[ \t]*:?", re.IGNORECASE)
_OTHER_LABEL = re.compile(r"[ \t]*[A-Za-z][\w+-]*[ \t]*\r?\n")
_QUERY = re.compile(r"\s*(?:--[^\n]*\n\s*|/\*.*?\*/\s*|\(\s*)*(?:select|with|values)\b", re.IGNORECASE | re.DOTALL)
_STATEMENT = re.compile(
    r"\s*(?:select|with|values|insert|update|delete|replace|create|drop|alter|pragma|attach|vacuum|explain)\b", re.IGNORECASE
)
_CONTINUES = re.compile(
    _STATEMENT.pattern
    + r"|\s*(?:from|where|join|left|inner|group|having|order|limit|union|intersect|except|on|and|or)\b|\s*\(",
    re.IGNORECASE,
)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_IN_PROSE = re.compile(
    r"(?:^|(?<=[:\n]))[ \t]*(?P<sql>(?:select\b|with\s+(?:recursive\s+)?[\w\"]+\s*(?:\([^)]*\))?\s+as\s*\().*)",
    re.IGNORECASE | re.DOTALL,
)


def parse(text: str) -> Parsed:
    """The query in ``text``: of several fenced queries the last; without a fence the text itself, or its tail from SELECT.

    What is returned is never repaired: it is run as the model wrote it, only without surrounding blanks and semicolons.
    """
    if not text.strip():
        return Parsed("", EMPTY)
    answer = _without_thinking(text)
    if not answer.strip():
        return Parsed("", ONLY_THINKING)
    sql = _fenced(answer)
    if sql is None:
        sql = _bare(answer)
    sql = _trimmed(sql)
    return Parsed(sql) if sql else Parsed("", NO_SQL)


def _without_thinking(text: str) -> str:
    """A block that is never closed hides all after it; one that was opened in the prompt hides all before its end."""
    answer, inside = "", False
    for part in _THINK.split(text):
        tag = part.lower()
        if tag == "<think>":
            inside = True
        elif tag == "</think>":
            answer, inside = (answer if inside else ""), False
        elif not inside:
            answer += part
    return answer


def _fenced(text: str) -> str | None:
    """The last fenced block that is SQL (a query before any other statement); None where no block is."""
    blocks = [_without_label(match["body"]) for match in _FENCE.finditer(text)]
    for kind in (_QUERY, _STATEMENT):
        if found := [body for _, body in blocks if kind.match(body)]:
            return found[-1]
    return next((body for labelled, body in reversed(blocks) if labelled and body.strip()), None)


def _without_label(body: str) -> tuple[bool, str]:
    """(is it labelled as SQL, the body without its label)."""
    if (match := _LABEL.match(body)) and not _QUERY.match(body):
        return match["label"].lower() not in ("text", "plaintext"), body[match.end() :]
    if match := _OTHER_LABEL.match(body):
        return False, body if _STATEMENT.match(body) else body[match.end() :]
    return False, body


def _bare(text: str) -> str:
    """A query without a fence: the whole text, inline code, or what follows a line that starts with SELECT or WITH."""
    if _STATEMENT.match(text) or _QUERY.match(text):
        return _first_statement(text)
    inline = [code for code in _INLINE.findall(text) if _QUERY.match(code)]
    if inline:
        return inline[-1]
    found = _IN_PROSE.search(text)
    return _first_statement(found["sql"]) if found else ""


def _first_statement(text: str) -> str:
    """Up to the blank line after which prose begins: models explain a bare query in the next paragraph.

    What follows stays where it is SQL too: a second statement must not be hidden from the executor, which refuses it.
    """
    head, *rest = re.split(r"\n\s*\n", text.strip(), maxsplit=1)
    return text if rest and _CONTINUES.match(rest[0]) else head


def _trimmed(sql: str) -> str:
    return re.sub(r"(?:\s*;)+\s*\Z", "", sql.strip())
