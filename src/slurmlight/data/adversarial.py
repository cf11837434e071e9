"""Harder variants of a task, made from its own data: the question reworded, a column renamed, a value where it misleads.

    variant(task, Path("RUN/adversarial"), seed=0) -> a task with another question, or another database and gold

Deterministic in task and seed. A gold is only changed where the database is, and both are checked against each other; where
a change cannot be made, the next kind is tried, and a question can always be reworded.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slurmlight.agents.contract import SqlTask
from slurmlight.sql.compare import same
from slurmlight.sql.execute import execute
from slurmlight.sql.schema import Schema, read_schema
from slurmlight.sql.tokens import Token, tokenize

KINDS = ("question", "column", "value")
WORDING: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"\bHow many\b", ("What is the number of", "Tell me the count of")),
    (r"\b(?:List|Show|Give|Find)\b", ("Tell me", "Look up", "I would like to see")),
    (r"\bWhat (?:is|are)\b", ("Tell me", "I want to know")),
    (r"\bWhich\b", ("What", "Name the")),
    (r"\bat least\b", ("no less than", "not below")),
    (r"\bat most\b", ("no more than", "not above")),
    (r"\bhighest\b|\bmaximum\b", ("largest", "greatest")),
    (r"\blowest\b|\bminimum\b", ("smallest", "least")),
    (r"\baverage\b", ("mean",)),
    (r"\bfor each\b|\bof each\b", ("per", "by")),
    (r"\bfor every\b|\bof every\b", ("per", "by")),
    (r"\bdifferent\b|\bdistinct\b", ("unique",)),
)
FRAMES = ("{}", "A colleague asks: {}", "{} Answer from the database.", "For a report: {}")
_TEXT = ("TEXT", "CHAR", "CLOB")

type Change = Sequence[str]  # SQL statements


def variant(task: SqlTask, folder: Path, seed: int) -> SqlTask:
    """One of the kinds, by lot. New databases go to ``folder``. Raises OSError where they cannot be written."""
    rng = random.Random(f"{seed}/{task.task_id}")
    for kind in rng.sample(KINDS, len(KINDS)):
        if kind == "question":
            return replace(task, task_id=f"{task.task_id}+question", question=reworded(task.question, rng))
        made = _with_column(task, folder, rng) if kind == "column" else _with_value(task, folder, rng)
        if made is not None:
            return made
    raise AssertionError("a question can always be reworded")


def reworded(question: str, rng: random.Random) -> str:
    """``question`` in other function words; names, numbers and values stay."""
    changed = question
    for pattern, words in WORDING:
        changed = re.sub(pattern, lambda match, words=words: _cased(rng.choice(words), match[0]), changed, flags=re.IGNORECASE)
    frames = FRAMES if changed != question else FRAMES[1:]
    return rng.choice(frames).format(changed)


def _cased(words: str, like: str) -> str:
    return words if like[:1].isupper() else words[:1].lower() + words[1:]


def _with_column(task: SqlTask, folder: Path, rng: random.Random) -> SqlTask | None:
    """A column of the gold under another name, in every table that has it, and the gold with it."""
    schema = read_schema(task.database)
    tables = {table.name.lower() for table in schema}
    columns = {column.name.lower() for table in schema for column in table.columns}
    named = sorted({_bare(token) for token in _names(task.gold)} & columns - tables)
    rng.shuffle(named)
    for old in named:
        new = _shortened(old)
        new = f"{old}_of_it" if new in columns | tables else new
        change = [
            f"ALTER TABLE {_quoted(table.name)} RENAME COLUMN {_quoted(column.name)} TO {_quoted(new)}"
            for table in schema
            for column in table.columns
            if column.name.lower() == old
        ]
        made = _changed(task, folder, change, renamed(task.gold, old, new), "column")
        if made is not None and _same_results(task, made):
            return made
    return None


def renamed(sql: str, old: str, new: str) -> str:
    """``sql`` with every name ``old`` (any case, quoted or not) replaced; literals and comments stay."""
    parts, at = [], 0
    for token in _names(sql):
        if _bare(token) == old.lower():
            parts += [sql[at : token.start], new if new.isidentifier() else _quoted(new)]
            at = token.end
    return "".join([*parts, sql[at:]])


def _with_value(task: SqlTask, folder: Path, rng: random.Random) -> SqlTask | None:
    """A value that the gold asks for, put into the first row of a column where it does not belong."""
    values = sorted({token.text for token in tokenize(task.gold) if token.kind == "string" and len(token.text) > 2})
    places = list(_misplaces(read_schema(task.database), {_bare(token) for token in _names(task.gold)}))
    pairs = [(value, table, column) for value in values for table, column in places]
    rng.shuffle(pairs)
    for value, table, column in pairs[:4]:
        first = f"(SELECT min(rowid) FROM {_quoted(table)})"
        change = [f"UPDATE {_quoted(table)} SET {_quoted(column)} = {value} WHERE rowid = {first}"]
        made = _changed(task, folder, change, task.gold, "value")
        if made is not None and all(execute(database, made.gold).rows for database in _databases(made)):
            return made
    return None


def _misplaces(schema: Schema, named: set[str]) -> Iterator[tuple[str, str]]:
    """Text columns that the gold does not name, of tables that it does."""
    for table in schema:
        if table.name.lower() in named:
            for column in table.columns:
                if column.name.lower() not in named and any(kind in column.type.upper() for kind in _TEXT):
                    yield table.name, column.name


def _changed(task: SqlTask, folder: Path, change: Change, gold: str, kind: str) -> SqlTask | None:
    """``task`` on copies of its databases with ``change`` made; None where a database refuses it."""
    digest = hashlib.sha256("\n".join([task.db_id, *change]).encode()).hexdigest()[:12]
    home = folder / f"{task.db_id}-{digest}"
    home.mkdir(parents=True, exist_ok=True)
    copies = [home / database.name for database in _databases(task)]
    for database, copy in zip(_databases(task), copies, strict=True):
        if not copy.exists() and not _write(database, copy, change):
            return None
    extra = task.extra | ({"instances": [str(copy) for copy in copies[1:]]} if copies[1:] else {})
    return replace(task, task_id=f"{task.task_id}+{kind}", database=copies[0], gold=gold, extra=extra)


def _write(database: Path, copy: Path, change: Change) -> bool:
    with tempfile.TemporaryDirectory(dir=copy.parent, prefix=".new-") as scratch:
        new = shutil.copyfile(database, Path(scratch, "new"))
        connection = sqlite3.connect(new, isolation_level=None)
        try:
            for statement in change:
                connection.execute(statement)
        except sqlite3.Error:  # a constraint, a view that would break: this change is not for this database
            return False
        finally:
            connection.close()
        os.replace(new, copy)
    return True


def _same_results(task: SqlTask, made: SqlTask) -> bool:
    pairs = [
        (execute(old, task.gold), execute(new, made.gold)) for old, new in zip(_databases(task), _databases(made), strict=True)
    ]
    return all(old.kind == new.kind == "rows" and old.rows and same(old.rows, new.rows) for old, new in pairs)


def _databases(task: SqlTask) -> list[Path]:
    return [task.database, *(Path(path) for path in task.extra.get("instances", []))]


def _names(sql: str) -> Iterator[Token]:
    return (token for token in tokenize(sql) if token.kind in ("word", "name"))


def _bare(token: Token) -> str:
    return token.text.strip('"`[]').lower()


def _shortened(name: str) -> str:
    """The first letter and the consonants after it, as hurried people name columns: salary -> slry."""
    return name[:1] + re.sub(r"[aeiou]", "", name[1:])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
