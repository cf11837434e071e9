"""The tiny preset's data: generated databases in two instances each, and questions in five splits, all from one seed.

FOLDER/database/DB/DB.sqlite, DB-2.sqlite    the same schema with other rows
FOLDER/{train,val,test,unseen}.parquet       question, db_id, query, family
FOLDER/recipe.json                           what made them; every file's sha256 comes last, when all are whole

``warm`` is for the supervised warm start; ``train``, for RL, is the part of it in which no family drowns the small ones.
"""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurmlight.data import domains, grammar
from slurmlight.data.domains import DOMAINS, UNSEEN, Domain
from slurmlight.data.grammar import FAMILIES, Question
from slurmlight.data.parquet import write_rows
from slurmlight.errors import UserError
from slurmlight.files import read_json, sync_folder, write_json

SPLITS = ("warm", "train", "val", "test", "unseen")
WANTED = {"warm": 4000, "val": 240, "test": 400, "unseen": 200}  # rows; small families give fewer
TRAIN_FAMILY_CAP = 100
INSTANCES = ("", "-2")
PATIENCE = 500  # draws without a new question after which a family is taken for used up
HELD_OUT_SHARE = 0.3  # at most this share of a family's distinct questions goes to val and test together


def ensure(folder: Path | str, seed: int = 0) -> bool:
    """Generate the data in ``folder`` unless they are there, whole, and made by this recipe. True where it wrote.

    A kill leaves a recipe.json without hashes: the next call starts again. Raises UserError where ``folder`` cannot be
    written, or holds files of these names that something else made.
    """
    folder = Path(folder)
    recipe = _recipe(seed)
    try:
        if is_whole(folder, recipe):
            return False
        _refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "recipe.json", {"recipe": recipe})  # first: what a kill leaves is known to be ours
        _write_databases(folder / "database", seed)
        splits = make_splits(folder / "database", seed)
        for name, questions in splits.items():
            write_rows(folder / f"{name}.parquet", [asdict(question) for question in questions])
        write_json(folder / "recipe.json", {"recipe": recipe, "files": _hashes(folder)})
    except OSError as error:
        raise UserError(f"cannot write toy data to {folder} ({error.strerror or error})", "choose another folder") from None
    return True


def is_whole(folder: Path, recipe: dict[str, Any]) -> bool:
    record = read_json(folder / "recipe.json")
    if not isinstance(record, dict) or record.get("recipe") != recipe:
        return False
    return record.get("files") == _hashes(folder)


def refuse_others(train: Path) -> None:
    """Raises UserError where generating for the train file ``train`` could not give it, or would overwrite files of others."""
    folder = train.parent
    try:
        _refuse_foreign(folder)
        if train.stem in SPLITS and train.suffix == ".parquet":
            return
        if train.exists() and _is_ours(folder):
            return  # somebody's own selection of the generated questions
    except OSError as error:
        raise UserError(f"data folder {folder} cannot be read ({error.strerror})", "choose another folder") from None
    raise UserError(
        f"data.train_files: {train} is none of the generated files ({', '.join(f'{name}.parquet' for name in SPLITS)})",
        "name one of them; questions of your own need a preset without [warmstart]",
    )


def _is_ours(folder: Path) -> bool:
    record = read_json(folder / "recipe.json")
    return isinstance(record, dict) and "recipe" in record


def _refuse_foreign(folder: Path) -> None:
    if _is_ours(folder):
        return
    if found := next((name for name in ("recipe.json", *_files()) if os.path.lexists(folder / name)), ""):
        raise UserError(f"{folder} holds a {found} that is not generated toy data", "choose another folder, or move it away")


def counts(folder: Path) -> dict[str, int]:
    """Rows of each split that is there."""
    import pyarrow.parquet as pq

    return {name: pq.read_metadata(folder / f"{name}.parquet").num_rows for name in SPLITS}


def make_splits(databases: Path, seed: int) -> dict[str, list[Question]]:
    """Distinct (database, question) pairs, none in two of warm, val and test; val and test have the same mix of families."""
    splits: dict[str, list[Question]] = {name: [] for name in SPLITS}
    trained = [domain for domain in DOMAINS if domain.name not in UNSEEN]
    unseen = [domain for domain in DOMAINS if domain.name in UNSEEN]
    total = sum(family.weight for family in FAMILIES)
    for family in FAMILIES:
        wanted = {name: round(size * family.weight / total) for name, size in WANTED.items()}
        rng = random.Random(f"{seed}/{family.name}")
        pool = _pool(family, trained, databases, wanted["warm"] + wanted["val"] + wanted["test"], rng)
        held = min(1.0, HELD_OUT_SHARE * len(pool) / (wanted["val"] + wanted["test"]))
        n_val, n_test = int(wanted["val"] * held), int(wanted["test"] * held)
        splits["val"] += pool[:n_val]
        splits["test"] += pool[n_val : n_val + n_test]
        splits["warm"] += pool[n_val + n_test :]
        splits["train"] += pool[n_val + n_test :][:TRAIN_FAMILY_CAP]
        splits["unseen"] += _pool(family, unseen, databases, wanted["unseen"], rng)
    for name, questions in splits.items():
        random.Random(f"{seed}/{name}").shuffle(questions)
    return splits


def _pool(family: grammar.Family, chosen: list[Domain], databases: Path, wanted: int, rng: random.Random) -> list[Question]:
    """Up to ``wanted`` distinct questions whose gold says something on every instance."""
    found: dict[tuple[str, str], Question] = {}
    instances = {domain.name: [_open(databases, domain, suffix) for suffix in INSTANCES] for domain in chosen}
    numbers = {name: _numbers(opened[0]) for name, opened in instances.items()}
    says: dict[tuple[str, str], bool] = {}
    try:
        draws, last_new = 0, 0
        while len(found) < wanted and draws - last_new < PATIENCE:
            draws += 1
            domain = rng.choice(chosen)
            question = grammar.draw(family, domain, numbers[domain.name], rng)
            key = (domain.name, question.query)
            if key not in says:
                says[key] = all(_says_something(connection, question.query) for connection in instances[domain.name])
            if says[key] and (domain.name, question.question) not in found:
                found[domain.name, question.question] = question
                last_new = draws
    finally:
        for connection in (one for opened in instances.values() for one in opened):
            connection.close()
    return list(found.values())


def _open(databases: Path, domain: Domain, suffix: str) -> sqlite3.Connection:
    path = databases / domain.name / f"{domain.name}{suffix}.sqlite"
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)


def _numbers(connection: sqlite3.Connection) -> grammar.Numbers:
    values = {}
    for domain in DOMAINS:
        for table in (*domain.bases, domain.link):
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table.name,)).fetchone():
                values[table.name] = [row[0] for row in connection.execute(f"SELECT {table.number} FROM {table.name}")]
    return values


def _says_something(connection: sqlite3.Connection, query: str) -> bool:
    """Rows without NULL, and not a lone 0: an empty result is matched by too many wrong queries."""
    rows = connection.execute(query).fetchall()
    return bool(rows) and rows != [(0,)] and all(value is not None for row in rows for value in row)


def _write_databases(folder: Path, seed: int) -> None:
    for domain in DOMAINS:
        home = folder / domain.name
        home.mkdir(parents=True, exist_ok=True)
        for suffix in INSTANCES:
            with tempfile.TemporaryDirectory(dir=home, prefix=".new-") as scratch:
                domains.fill(domain, Path(scratch, "new"), f"{seed}/{domain.name}{suffix}")
                os.replace(Path(scratch, "new"), home / f"{domain.name}{suffix}.sqlite")
        sync_folder(home)


def _files() -> Iterator[str]:
    for domain in DOMAINS:
        for suffix in INSTANCES:
            yield f"database/{domain.name}/{domain.name}{suffix}.sqlite"
    for name in SPLITS:
        yield f"{name}.parquet"


def _hashes(folder: Path) -> dict[str, str]:
    return {name: sha256_of([folder / name]) for name in _files() if (folder / name).is_file()}


def sha256_of(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _recipe(seed: int) -> dict[str, Any]:
    """All that decides the files' content: a change of any of it makes the next ``ensure`` write them anew."""
    here = Path(__file__).parent
    sources = [here / name for name in ("domains.py", "grammar.py", "toy.py", "parquet.py")]
    return {"seed": seed, "sources": sha256_of(sources), "sqlite": sqlite3.sqlite_version}
