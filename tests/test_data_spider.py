"""The import of a Spider download: usable rows are written, everything else is named, nothing usable is exit code 2."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slurmlight.cli.data import register
from slurmlight.data.parquet import read_rows
from slurmlight.data.spider import import_spider
from slurmlight.data.tasks import load_tasks
from slurmlight.errors import UserError
from tests.shared import shared


def make_database(folder: Path, name: str, rows: int = 3) -> None:
    home = folder / name
    home.mkdir(parents=True)
    with sqlite3.connect(home / f"{name}.sqlite") as connection:
        connection.execute("CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT)")
        connection.executemany("INSERT INTO singer VALUES (?, ?)", [(n, f"n{n}") for n in range(rows)])
    connection.close()


def row(db_id: str, query: str = "SELECT count(*) FROM singer") -> dict[str, object]:
    return {"db_id": db_id, "question": "How many singers?", "query": query, "query_toks": ["more", "keys"]}


@pytest.fixture
def download(tmp_path: Path) -> Path:
    home = tmp_path / "download/spider"
    make_database(home / "database", "good")
    make_database(home / "database", "other")
    (home / "database/broken").mkdir()
    (home / "database/broken/broken.sqlite").write_text("this is no database, only a long enough text " * 100)
    train = [
        row("good"),
        row("other"),
        row("missing"),
        row("missing"),
        row("broken"),
        row("../../good"),
        row("good", "SELECT x"),
    ]
    train += [{"db_id": "good", "question": "no query"}, row("good", "")]
    (home / "train_spider.json").write_text(json.dumps(train))
    (home / "dev.json").write_text(json.dumps([row("good", f"SELECT {n} FROM singer") for n in range(700)]))
    return home


def test_usable_rows_are_written_and_the_rest_is_named(download: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    report = import_spider(download.parent, out)  # one folder further up is fine too
    train = report.splits[0]
    assert [(one["db_id"], one["query"]) for one in read_rows(out / "train_spider.parquet")] == [
        ("good", "SELECT count(*) FROM singer"),
        ("other", "SELECT count(*) FROM singer"),
    ]
    assert train.no_database == {"missing": 2, "broken": 1, "../../good": 1}
    assert [line.split(":")[0] for line in train.failed] == ["row 6 (good)", "row 7", "row 8"]
    assert "no such column: x" in train.failed[0]
    assert "7000" in train.note
    assert any("broken.sqlite" in problem for problem in report.problems)
    assert sorted(path.name for path in (out / "database").iterdir()) == ["good", "other"]
    assert [task.database.is_file() for task in load_tasks(out / "train_spider.parquet")] == [True, True]


def test_validation_files_are_pandas_samples_of_test_or_else_of_dev(download: Path, tmp_path: Path) -> None:
    report = import_spider(download, tmp_path / "dev")
    samples = {split.name: split for split in report.splits if split.name.startswith("test_dev")}
    assert [len(split.rows) for split in samples.values()] == [500, 100]
    assert all("sampled from dev" in split.note for split in samples.values())
    # pandas 3.1.1: DataFrame({"n": range(700)}).sample(500, random_state=0)["n"][:5] and .sample(100, random_state=42)["n"][:5]
    first = [[int(one["query"].split()[1]) for one in split.rows[:5]] for split in samples.values()]
    assert first == [[306, 604, 40, 493, 14], [158, 500, 396, 155, 321]]

    make_database(download / "test_database", "hidden")
    (download / "test.json").write_text(json.dumps([row("hidden")] * 120))
    report = import_spider(download, tmp_path / "test")
    samples = {split.name: split for split in report.splits if split.name.startswith("test_dev")}
    assert [(split.source, len(split.rows), split.note) for split in samples.values()] == [
        ("sample of test", 120, ""),
        ("sample of test", 100, ""),
    ]
    assert (tmp_path / "test/database/hidden/hidden.sqlite").is_file()


def test_a_second_import_gives_the_same_bytes_and_a_link_is_a_link(download: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    import_spider(download, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    import_spider(download, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    import_spider(download, tmp_path / "linked", "link")
    assert (tmp_path / "linked/database/good").is_symlink()
    import_spider(download, tmp_path / "linked", "copy")
    assert not (tmp_path / "linked/database/good").is_symlink()


def test_one_corrupt_file_is_named_and_the_other_imported(download: Path, tmp_path: Path) -> None:
    (download / "train_spider.json").write_text('[{"db_id": "good", ')
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["data", "spider", "--from", str(download), "--out", str(tmp_path / "data")])
    assert result.exit_code == 0, result.output
    assert "train_spider.json is not JSON" in result.output
    assert len(read_rows(tmp_path / "data/dev.parquet")) == 700


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda home: [path.unlink() for path in home.glob("*.json")], "holds no train_spider.json"),
        (lambda home: (home / "database").rename(home / "elsewhere"), "has no folder database/"),
        (lambda home: [path.write_text("{}") for path in home.glob("*.json")], "nothing in .* can be used.*not a list"),
        (lambda home: [path.unlink() for path in home.glob("database/*/*.sqlite")], "rows without a usable database"),
    ],
)
def test_nothing_usable_is_one_clear_line(download: Path, tmp_path: Path, spoil, says: str) -> None:
    spoil(download)
    with pytest.raises(UserError, match=says) as caught:
        import_spider(download, tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_lists_without_end_and_names_too_long_are_named(download: Path, tmp_path: Path) -> None:
    (download / "dev.json").write_text("[" * 100_000)
    (download / "train_spider.json").write_text(json.dumps([row("good"), row("x" * 300)]))
    report = import_spider(download, tmp_path / "data")
    assert any("dev.json is not JSON" in problem for problem in report.problems)
    assert report.splits[0].no_database == {"x" * 300: 1}
    with pytest.raises(UserError, match="is not a folder"):
        import_spider(tmp_path / ("x" * 300), tmp_path / "data")


def test_the_real_data(tmp_path: Path) -> None:
    with tarfile.open(shared("data", "spider.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    report = import_spider(tmp_path, tmp_path / "data", "link")
    train, dev = report.splits[:2]
    assert (len(train.rows), len(train.failed), train.no_database) == (
        6787,
        3,
        {"chinook_1": 84, "store_1": 112, "soccer_1": 14},
    )
    assert (len(dev.rows), dev.failed, dev.no_database) == (1034, [], {})
    assert report.databases == 157
