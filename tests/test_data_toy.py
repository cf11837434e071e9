"""The toy data: splits that do not leak, golds that say something on both instances, the same bytes from the same seed."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slurmlight.cli import build
from slurmlight.data import toy
from slurmlight.data.parquet import read_rows
from slurmlight.data.tasks import load_tasks
from slurmlight.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    assert toy.ensure(path, seed=3)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_same_seed_same_bytes_other_seed_other_bytes(folder: Path, tmp_path: Path) -> None:
    toy.ensure(tmp_path / "again", seed=3)
    assert contents(tmp_path / "again") == contents(folder)
    toy.ensure(tmp_path / "again", seed=4)  # also: another recipe replaces what is there
    other = contents(tmp_path / "again")
    assert other.keys() == contents(folder).keys()
    assert all(other[name] != data for name, data in contents(folder).items())


def test_second_call_does_nothing_and_damage_is_mended(folder: Path) -> None:
    before = contents(folder)
    assert not toy.ensure(folder, seed=3)
    database = folder / "database/shop/shop-2.sqlite"
    database.write_bytes(database.read_bytes()[:-100])
    (folder / "val.parquet").unlink()
    assert toy.ensure(folder, seed=3)
    assert contents(folder) == before


def test_no_question_is_in_two_splits_and_one_database_is_never_trained_on(folder: Path) -> None:
    keys = {name: [(row["db_id"], row["question"]) for row in read_rows(folder / f"{name}.parquet")] for name in toy.SPLITS}
    every = [key for name in ("warm", "val", "test", "unseen") for key in keys[name]]
    assert len(every) == len(set(every))
    assert set(keys["train"]) < set(keys["warm"])  # RL is on questions of the warm start
    trained = {db for name in ("warm", "train", "val", "test") for db, _ in keys[name]}
    assert len(trained) >= 4
    assert {db for db, _ in keys["unseen"]} == set(toy.UNSEEN)
    assert not trained & set(toy.UNSEEN)


def test_val_and_test_have_the_same_mix_of_families(folder: Path) -> None:
    shares = []
    for name in ("val", "test"):
        families = [row["family"] for row in read_rows(folder / f"{name}.parquet")]
        shares.append({family: count / len(families) for family, count in Counter(families).items()})
    assert shares[0].keys() == shares[1].keys() == {family.name for family in toy.FAMILIES}
    assert all(abs(shares[0][family] - shares[1][family]) < 0.02 for family in shares[0])


def test_no_family_drowns_the_others_in_rl(folder: Path) -> None:
    families = Counter(row["family"] for row in read_rows(folder / "train.parquet"))
    assert families.keys() == {family.name for family in toy.FAMILIES}
    assert max(families.values()) <= toy.TRAIN_FAMILY_CAP < len(read_rows(folder / "train.parquet")) / 8


def test_every_gold_says_something_on_both_instances_and_most_results_differ(folder: Path) -> None:
    same = total = 0
    for name in toy.SPLITS:
        for task in load_tasks(folder / f"{name}.parquet", instances=2):
            results = []
            for path in (str(task.database), *task.extra["instances"]):
                with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
                    results.append(connection.execute(task.gold).fetchall())
            assert all(rows and rows != [(0,)] and None not in [cell for row in rows for cell in row] for rows in results)
            same += results[0] == results[1]
            total += 1
    assert same < total / 10


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write toy data to .*file"):
        toy.ensure(tmp_path / "file", seed=0)


@pytest.mark.parametrize("name", ["train.parquet", "recipe.json", "database/shop/shop.sqlite"])
def test_files_of_somebody_else_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"holds a {name} that is not generated toy data") as caught:
        toy.ensure(tmp_path, seed=0)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == {name: b"mine"}


def test_what_a_kill_left_is_known_to_be_ours(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(toy, "_hashes", killed)  # all is written but the recipe's end
        toy.ensure(tmp_path, seed=3)
    assert (tmp_path / "train.parquet").exists()
    assert toy.ensure(tmp_path, seed=3)
    assert contents(tmp_path) == contents(folder)


def test_a_train_file_that_is_not_generated_is_refused(folder: Path, tmp_path: Path) -> None:
    toy.refuse_others(tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"nope\.parquet is none of the generated files"):
        toy.refuse_others(tmp_path / "nope.parquet")
    (tmp_path / "nope.parquet").write_text("mine")
    with pytest.raises(UserError, match="none of the generated files"):
        toy.refuse_others(tmp_path / "nope.parquet")
    shutil.copytree(folder, tmp_path / "toy")
    shutil.copy(folder / "train.parquet", tmp_path / "toy/chosen.parquet")
    toy.refuse_others(tmp_path / "toy/chosen.parquet")  # a selection beside what it was selected from


def test_a_name_too_long_for_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write toy data to .*too long"):
        toy.ensure(tmp_path / ("x" * 300), seed=0)


def test_the_default_folder_is_where_the_presets_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    monkeypatch.setattr(toy, "ensure", lambda folder, seed: made.append(folder))
    monkeypatch.setattr(toy, "counts", lambda folder: {})
    assert CliRunner().invoke(build(), ["data", "toy"], catch_exceptions=False).exit_code == 0
    assert made == [tmp_path / "data/toy"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "train.parquet").unlink(), "does not exist"),
        (lambda folder: (folder / "train.parquet").write_bytes(b"PAR1 nonsense"), "cannot be read as parquet"),
        (lambda folder: (folder / "database/shop/shop-2.sqlite").write_text("no database"), "no usable database.*shop"),
        (lambda folder: (folder / "database/shop/shop.sqlite").unlink(), "no usable database.*shop"),
    ],
)
def test_damaged_input_is_one_clear_line(folder: Path, tmp_path: Path, damage, says: str) -> None:
    shutil.copytree(folder, tmp_path / "toy")
    damage(tmp_path / "toy")
    with pytest.raises(UserError, match=says) as caught:
        load_tasks(tmp_path / "toy/train.parquet", instances=2)
    assert "\n" not in str(caught.value)
