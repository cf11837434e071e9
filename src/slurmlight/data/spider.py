"""Import a Spider download: rows whose database is there and whose gold runs become parquet files, the rest is named.

Accepted below the given folder, or in one folder further down: train_spider.json, dev.json, test.json (or test_data/dev.json),
database/DB/DB.sqlite and test_database/DB/DB.sqlite. Spider: Yu et al. 2018, https://yale-lily.github.io/spider.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slurmlight.data.parquet import COLUMNS, write_rows
from slurmlight.errors import UserError
from slurmlight.files import sync_folder
from slurmlight.sql.execute import Limits, execute

Row = dict[str, str]
Progress = Callable[[str, int, int], None]  # file, rows done, rows

OFFICIAL_ROWS = {"train_spider": 7000, "dev": 1034, "test": 2147}
SAMPLES = {
    "test_dev_500": (500, 0),
    "test_dev": (100, 42),
}  # rows and pandas random_state of Agent-Lightning's convert_dataset.py
GOLD_LIMITS = Limits(timeout_s=30.0, max_rows=1_000_000)


@dataclass
class Split:
    """One parquet file: how many rows the source had, which were kept, and why the others were not (reason -> rows)."""

    name: str
    source: str
    total: int
    rows: list[Row] = field(default_factory=list)
    no_database: dict[str, int] = field(default_factory=dict)  # database -> rows
    failed: list[str] = field(default_factory=list)  # one line a gold or row
    note: str = ""


@dataclass
class Report:
    splits: list[Split] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # files that could not be used
    databases: int = 0


def import_spider(
    source: Path, out: Path, databases: Literal["copy", "link"] = "copy", progress: Progress | None = None
) -> Report:
    """Write the splits and databases under ``out``. Raises UserError where nothing in ``source`` can be used."""
    home = _find(source)
    report = Report()
    homes = [folder for folder in (home / "database", home / "test_database", home / "test_data/database") if folder.is_dir()]
    if not homes:
        raise UserError(f"{home} has no folder database/", "unpack the whole download; the questions alone cannot be scored")
    checker = _Checker(homes, progress)
    parts: dict[str, list[Row]] = {}
    for name, files in (
        ("train_spider", ["train_spider.json"]),
        ("dev", ["dev.json"]),
        ("test", ["test.json", "test_data/dev.json"]),
    ):
        found = next((home / file for file in files if (home / file).is_file()), None)
        if found is None:
            if name != "test":
                report.problems.append(f"{home / files[0]} is missing")
            continue
        try:
            parts[name] = _read(found)
        except UserError as error:
            report.problems.append(str(error))
            continue
        if name != "test":
            report.splits.append(checker.split(name, found.name, parts[name]))
    report.splits += _samples(parts, checker)
    if not any(split.rows for split in report.splits):
        named = "; ".join(report.problems) or _reasons(report.splits)
        raise UserError(f"nothing in {source} can be used: {named}", "check the download")
    _write(report, checker, out, databases)
    return report


def _samples(parts: dict[str, list[Row]], checker: _Checker) -> list[Split]:
    """The documented validation files are samples of Spider's test split; without one they are made of dev, and say so."""
    import numpy as np

    origin = "test" if any(checker.database(row["db_id"]) for row in parts.get("test", ())) else "dev"
    if origin not in parts:
        return []
    lacking = "the test split's databases are missing" if "test" in parts else "the download has no test split"
    rows, splits = parts[origin], []
    for name, (size, seed) in SAMPLES.items():
        # What pandas' DataFrame.sample(n, random_state=seed) takes.
        chosen = np.random.RandomState(seed).choice(len(rows), size=min(size, len(rows)), replace=False)
        split = checker.split(name, f"sample of {origin}", [rows[index] for index in chosen])
        if origin == "dev":
            split.note = f"sampled from dev ({lacking}): scores are not comparable with those on the documented file"
        splits.append(split)
    return splits


class _Checker:
    """Finds databases and runs golds; remembers both."""

    def __init__(self, homes: Sequence[Path], progress: Progress | None) -> None:
        self.homes = homes
        self.progress = progress
        self.used: dict[str, Path] = {}
        self.verdicts: dict[tuple[str, str], str] = {}
        self.broken: dict[str, str] = {}

    def split(self, name: str, source: str, rows: list[Row]) -> Split:
        split = Split(name, source, len(rows))
        for number, row in enumerate(rows):
            if self.progress and number % 50 == 0:
                self.progress(name, number, len(rows))
            self._sort(split, number, row)
        if self.progress:
            self.progress(name, len(rows), len(rows))
        expected = OFFICIAL_ROWS.get(name)
        if expected is not None and len(rows) != expected:
            split.note = f"Spider 1.0 has {expected} rows here, this file {len(rows)}"
        return split

    def _sort(self, split: Split, number: int, row: Row) -> None:
        lacking = [column for column in COLUMNS if not row.get(column)]
        if lacking:
            split.failed.append(f"row {number}: no {', '.join(lacking)}")
            return
        database = self.database(row["db_id"])
        if database is None:
            split.no_database[row["db_id"]] = split.no_database.get(row["db_id"], 0) + 1
            return
        key = (row["db_id"], row["query"])
        if key not in self.verdicts:
            self.verdicts[key] = self._run(database, row)
        if row["db_id"] in self.broken:
            split.no_database[row["db_id"]] = split.no_database.get(row["db_id"], 0) + 1
        elif self.verdicts[key]:
            split.failed.append(f"row {number} ({row['db_id']}): {self.verdicts[key]}")
        else:
            split.rows.append(row)
            self.used[row["db_id"]] = database

    def database(self, db_id: str) -> Path | None:
        """The file of a database; None where there is none, or where the id is no plain name."""
        if Path(db_id).name != db_id or db_id in (".", ".."):
            return None
        paths = (home / db_id / f"{db_id}.sqlite" for home in self.homes)
        return next((path for path in paths if os.path.isfile(path)), None)  # Path.is_file raises for a name too long

    def _run(self, database: Path, row: Row) -> str:
        """Why the gold does not work; "" where it runs."""
        try:
            result = execute(database, row["query"], GOLD_LIMITS)
        except UserError as error:
            self.broken[row["db_id"]] = str(error)
            return "broken database"
        return "" if result.kind == "rows" else f"{result.kind}: {result.message}"


def _find(source: Path) -> Path:
    if not os.path.isdir(source):  # unlike Path.is_dir it answers for a name too long to be one, too
        raise UserError(f"{source} is not a folder", "give the folder of an unpacked Spider download")
    names = ("train_spider.json", "dev.json", "test.json")
    for folder in (source, *sorted(path for path in source.iterdir() if path.is_dir())):
        if any((folder / name).is_file() for name in names):
            return folder
    raise UserError(
        f"{source} holds no {', '.join(names)}", "give the folder of an unpacked Spider download (the one with database/)"
    )


def _read(path: Path) -> list[Row]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error})") from None
    if not isinstance(value, list) or not value:
        raise UserError(f"{path} is not a list of questions")
    keep = lambda row, name: row[name] if isinstance(row, dict) and isinstance(row.get(name), str) else ""  # noqa: E731
    return [{name: keep(row, name).strip() for name in COLUMNS} for row in value]


def _write(report: Report, checker: _Checker, out: Path, databases: Literal["copy", "link"]) -> None:
    try:
        (out / "database").mkdir(parents=True, exist_ok=True)
        for db_id, path in sorted(checker.used.items()):
            _place(path.parent, out / "database" / db_id, databases)
        sync_folder(out / "database")
        for split in report.splits:
            if split.rows:
                write_rows(out / f"{split.name}.parquet", split.rows)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror or error})", "make room or choose another folder") from None
    report.databases = len(checker.used)
    report.problems += [f"database {db_id}: {why}" for db_id, why in sorted(checker.broken.items())]


def _place(source: Path, target: Path, how: Literal["copy", "link"]) -> None:
    """Put a database folder's SQLite files at ``target``; what is there already, by size and time, stays."""
    if how == "link":
        if target.is_symlink():
            target.unlink()
        if not target.exists():
            target.symlink_to(source.absolute())
        return
    if target.is_symlink():
        target.unlink()
    target.mkdir(exist_ok=True)
    for file in sorted(source.glob("*.sqlite")):
        placed, stat = target / file.name, file.stat()
        if placed.exists() and (placed.stat().st_size, placed.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            continue
        temporary = target / f".{file.name}.{os.getpid()}.tmp"
        try:
            shutil.copy2(file, temporary)
            os.replace(temporary, placed)
        finally:
            temporary.unlink(missing_ok=True)


def _reasons(splits: list[Split]) -> str:
    no_database = sum(sum(split.no_database.values()) for split in splits)
    return f"{no_database} rows without a usable database, {sum(len(split.failed) for split in splits)} golds that fail"
