"""Pairs of gold and predicted SQL from the usual two files, and where their databases lie."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmlight.errors import UserError
from slurmlight.rewards.sql import content_identity
from slurmlight.sql.execute import identity

_DB_ID = re.compile(r"[\w.-]*\w[\w.-]*")


@dataclass(frozen=True)
class Pair:
    """One question: ``index`` from 0 in the order of the gold file."""

    index: int
    db_id: str
    gold: str
    pred: str


def read_pairs(gold: Path, pred: Path) -> list[Pair]:
    """The pairs of a gold file (lines ``SQL<TAB>db_id``) and a prediction file (one a line, an empty line for none).

    Lines end in LF or CRLF. Blank gold lines (between the sessions of SParC and CoSQL) are no questions. A prediction keeps
    its tabs as blanks; a last column that repeats the gold's db_id is dropped. Bytes that are not UTF-8 are kept as
    surrogates. Raises UserError for a malformed gold line and for files that do not have equally many lines.
    """
    gold_lines, pred_lines = _lines(gold), _lines(pred)
    golds = [(number, line) for number, line in enumerate(gold_lines) if line.strip()]
    if not golds:
        raise UserError(f"{gold} holds no gold query", "each line is SQL, a tab and the db_id")
    preds = _aligned(gold_lines, pred_lines, golds, pred, gold)
    pairs = []
    for index, ((number, line), prediction) in enumerate(zip(golds, preds, strict=True)):
        sql, tab, db_id = line.strip().rpartition("\t")
        if not tab or not _DB_ID.fullmatch(db_id.strip()):
            raise UserError(
                f"{gold}, line {number + 1}: no tab and db_id behind the SQL", "each line is SQL, a tab and the db_id"
            )
        body, tab, last = prediction.rpartition("\t")
        prediction = body if tab and last.strip() == db_id.strip() else prediction
        pairs.append(Pair(index, db_id.strip(), sql.strip(), prediction.strip(" \t")))
    return pairs


def _lines(path: Path) -> list[str]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "check the path") from None
    text = raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if not lines[-1] else lines


def _aligned(gold_lines: list[str], pred_lines: list[str], golds: list[tuple[int, str]], pred: Path, gold: Path) -> list[str]:
    """The prediction of each gold: line by line, else without the blank lines that only separate."""
    if len(pred_lines) == len(golds):
        return pred_lines
    if len(pred_lines) == len(gold_lines):
        return [pred_lines[number] for number, _ in golds]
    trimmed = list(pred_lines)
    while len(trimmed) > len(golds) and not trimmed[-1].strip():
        trimmed.pop()
    if len(trimmed) == len(golds):
        return trimmed
    filled = [line for line in pred_lines if line.strip()]
    if len(filled) == len(golds):
        return filled
    raise UserError(
        f"{pred} has {len(pred_lines)} lines for the {len(golds)} golds of {gold}",
        "give one prediction a line, an empty line where there is none",
    )


def instances(folder: Path, db_id: str) -> list[Path]:
    """Every ``*.sqlite`` file of ``folder/db_id`` in order of name: one is plain execution match, several a test suite.

    Raises UserError where that cannot be told (a name too long for a folder, no permission).
    """
    try:
        return sorted(path for path in (folder / db_id).glob("*.sqlite") if path.is_file())
    except OSError as error:
        raise UserError(f"cannot look for the databases of {db_id} in {folder} ({error.strerror})", "check the db_id") from None


def database_set(folder: Path, db_ids: Iterable[str]) -> str:
    """A line that names what was measured on: folder, counts and a hash over all contents."""
    digest = hashlib.sha256()
    databases = files = 0
    for db_id in sorted(set(db_ids)):
        paths = instances(folder, db_id)
        databases += bool(paths)
        files += len(paths)
        for path in paths:
            digest.update(f"{db_id}/{path.name} {content_identity(identity(path))}\n".encode())
    count = "one instance each" if files == databases else f"{files} instances"
    return f"{folder.resolve().name}: {databases} databases, {count}, sha256 {digest.hexdigest()[:12]}"
