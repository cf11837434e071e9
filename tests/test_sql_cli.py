"""slurmlight sql check and score, as people call them: files of every shape, reports, one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from slurmlight.cli import main
from slurmlight.errors import UserError
from slurmlight.rewards.pairs import read_pairs
from tests.sqlbed import build, sha256

GOLDS = [
    "SELECT name FROM emp",
    "SELECT count(*) FROM emp",
    "SELECT name FROM emp WHERE dept = 'Z'",
    "SELECT nmae FROM emp",
    "SELECT name, age FROM emp ORDER BY age",
]
PREDS = ["select name from emp;", "SELECT 4", "DROP TABLE emp", "SELECT name FROM emp", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "db" / "office").mkdir(parents=True)
    build(tmp_path / "db" / "office" / "office.sqlite")
    (tmp_path / "gold.sql").write_text("".join(f"{gold}\toffice\n" for gold in GOLDS))
    (tmp_path / "pred.sql").write_text("".join(f"{pred}\n" for pred in PREDS))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["sql", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def score(capsys: pytest.CaptureFixture[str], folder: Path, *more: object) -> tuple[int, str, str]:
    files = ("--gold", folder / "gold.sql", "--pred", folder / "pred.sql", "--db-dir", folder / "db", "--out", folder / "out")
    return run(capsys, "score", *files, *more)


def test_score_counts_and_writes_every_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = folder / "db" / "office" / "office.sqlite"
    before = sha256(database)
    code, out, err = score(capsys, folder, "--json", "--workers", 2, "--compare")
    report: dict[str, Any] = json.loads(out)
    assert code == 0 and "5/5" in err
    assert (report["evaluator"], report["pairs"], report["scored"], report["correct"]) == ("strict", 5, 4, 1)
    assert report["accuracy"] == 0.25
    assert report["database_set"].startswith("db: 1 databases, one instance each, sha256 ")
    assert (report["unscorable"], report["unscorable_by_kind"]) == (1, {"gold_error": 1})
    assert report["kinds"] == {"refused": 2, "match": 1, "rows": 1}
    assert report["errors"] == {"not_a_query": 2}
    assert report["by_hardness"]["easy"] == {"accuracy": 1 / 3, "correct": 1, "scored": 3}
    assert report["differences"] == {"official 1, strict 0: not a query": 1}
    rows = parquet.read_table(folder / "out" / "verdicts.parquet").to_pylist()
    assert [list(row) for row in rows[:1]] == [["index", "db_id", "gold", "pred", "verdict", "reason", "vacuous"]]
    assert [row["verdict"] for row in rows] == [1, 0, 0, None, 0]
    assert [row["vacuous"] for row in rows] == [False, False, True, False, False]
    assert rows[2]["reason"] == "refused/not_a_query: not a query: DROP"
    assert rows[3]["reason"].startswith("unscorable: gold_error: no such column: nmae")
    assert sha256(database) == before


def test_official_and_strict_differ_where_they_should(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = score(capsys, folder, "--json", "--evaluator", "official")
    report = json.loads(out)
    assert code == 0
    assert (report["evaluator"], report["correct"], report["vacuous_matches"]) == ("official", 2, 1)


def test_a_report_for_people_names_evaluator_and_databases(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = score(capsys, folder)
    assert code == 0
    for part in ("evaluator strict", "databases db: 1 databases", "25.0 %", "unscorable (left out): 1", "no such column: nmae"):
        assert part in out


def test_several_instances_must_all_match(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sqlite3

    second = build(folder / "db" / "office" / "second.sqlite")
    changed = sqlite3.connect(second)
    changed.execute("DELETE FROM emp WHERE id = 1")
    changed.commit()
    changed.close()
    (folder / "gold.sql").write_text("SELECT count(*) FROM emp\toffice\n")
    (folder / "pred.sql").write_text("SELECT 5\n")
    report = json.loads(score(capsys, folder, "--json")[1])
    assert report["correct"] == 0
    assert "2 instances" in report["database_set"]


@pytest.mark.parametrize(
    ("gold", "pred", "expected"),
    [
        (b"SELECT 1\toffice\nSELECT 2\toffice\n", b"SELECT 1\nSELECT 2\n", ["SELECT 1", "SELECT 2"]),
        (b"SELECT 1\toffice\r\nSELECT 2\toffice\r\n", b"SELECT 1\r\nSELECT 2", ["SELECT 1", "SELECT 2"]),
        (b"\xef\xbb\xbfSELECT 1\toffice\nSELECT 2\toffice", b"\xef\xbb\xbfSELECT 1\n\n", ["SELECT 1", ""]),
        (b"SELECT 1\toffice\n\nSELECT 2\toffice\n", b"SELECT 1\n\nSELECT 2\n", ["SELECT 1", "SELECT 2"]),
        (b"SELECT 1\toffice\nSELECT 2\toffice\n", b"SELECT 1\n\nSELECT 2\n\n", ["SELECT 1", "SELECT 2"]),
        (b"SELECT 1\toffice\nSELECT 2\toffice\n", b"\nSELECT 2\n\n\n", ["", "SELECT 2"]),
        (b"SELECT\t1\toffice\n", b"SELECT\t1\toffice\n", ["SELECT\t1"]),
        (b"SELECT 1\toffice\n", b"SELECT\t1 \n", ["SELECT\t1"]),
        (b"SELECT 1\toffice\n", b"SELECT '\xff'\n", ["SELECT '\udcff'"]),
        (b"SELECT 1\toffice\n", b"SELECT '\xe2\x80\xa8'\x0b\n", ["SELECT '\u2028'\x0b"]),
    ],
)
def test_prediction_files_of_every_shape(tmp_path: Path, gold: bytes, pred: bytes, expected: list[str]) -> None:
    (tmp_path / "gold.sql").write_bytes(gold)
    (tmp_path / "pred.sql").write_bytes(pred)
    pairs = read_pairs(tmp_path / "gold.sql", tmp_path / "pred.sql")
    assert [pair.pred for pair in pairs] == expected
    assert {pair.db_id for pair in pairs} == {"office"}


@pytest.mark.parametrize(
    ("gold", "pred", "message"),
    [
        (b"SELECT 1\toffice\n", b"SELECT 1\nSELECT 2\n", "2 lines for the 1 golds"),
        (b"SELECT 1\toffice\nSELECT 2\toffice\n", b"SELECT 1\n", "1 lines for the 2 golds"),
        (b"SELECT 1\toffice\n", b"", "0 lines for the 1 golds"),
        (b"SELECT 1\n", b"SELECT 1\n", "line 1: no tab and db_id"),
        (b"SELECT 1\t../office\n", b"SELECT 1\n", "line 1: no tab and db_id"),
        (b"\n", b"\n", "holds no gold"),
    ],
)
def test_files_that_do_not_fit_are_one_clear_error(tmp_path: Path, gold: bytes, pred: bytes, message: str) -> None:
    (tmp_path / "gold.sql").write_bytes(gold)
    (tmp_path / "pred.sql").write_bytes(pred)
    with pytest.raises(UserError, match=message):
        read_pairs(tmp_path / "gold.sql", tmp_path / "pred.sql")


def test_hostile_predictions_are_named_outcomes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endless = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM r) SELECT count(*) FROM r"
    preds = [endless, "SELECT '" + "x" * 1_000_000 + "'", "\0", "SELECT 1\x1b[2J", "SELECT '\udcff'"]
    golds = ["SELECT count(*) FROM emp", GOLDS[2], GOLDS[2], GOLDS[2], GOLDS[2]]
    (folder / "gold.sql").write_text("".join(f"{gold}\toffice\n" for gold in golds))
    (folder / "pred.sql").write_bytes("".join(f"{pred}\n" for pred in preds).encode("utf-8", "surrogateescape"))
    code, out, _ = score(capsys, folder, "--json", "--timeout", 0.3)
    report = json.loads(out)
    assert (code, report["correct"], report["scored"]) == (0, 0, 5)
    assert report["kinds"] == {"error": 3, "timeout": 1, "too_large": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--gold": "none.sql"}, "cannot read"),
        ({"--db-dir": "out"}, "holds no database"),
        ({"--out": "gold.sql/out"}, "cannot make the folder"),
    ],
)
def test_bad_arguments_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], message: str
) -> None:
    arguments = {"--gold": "gold.sql", "--pred": "pred.sql", "--db-dir": "db", "--out": "out"} | change
    code, out, err = run(capsys, "score", *(part for name, value in arguments.items() for part in (name, folder / value)))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(("db_id", "db_dir"), [("x" * 300, "db"), ("office", "x" * 300)], ids=["db_id", "db_dir"])
def test_a_name_too_long_for_a_folder_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], db_id: str, db_dir: str
) -> None:
    (folder / "gold.sql").write_text(f"SELECT 1\t{db_id}\n")
    (folder / "pred.sql").write_text("SELECT 1\n")
    files = ("--gold", folder / "gold.sql", "--pred", folder / "pred.sql", "--db-dir", folder / db_dir, "--out", folder / "out")
    code, out, err = run(capsys, "score", *files)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"cannot look for the databases of {db_id}" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [({"--timeout": "nan"}, "no number of seconds"), ({"--db": "x" * 300}, "cannot look at")],
    ids=["nan", "long"],
)
def test_bad_arguments_of_check_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], message: str
) -> None:
    arguments: dict[str, object] = {"--db": folder / "db/office/office.sqlite", "--gold": "SELECT 1", "--pred": "1"}
    code, out, err = run(capsys, "check", *(part for pair in (arguments | change).items() for part in pair))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_check_shows_results_verdicts_and_reasons(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = folder / "db" / "office" / "office.sqlite"
    pair = ("--gold", "SELECT name, age FROM emp ORDER BY age", "--pred", "SELECT name, age FROM emp ORDER BY age, name DESC")
    code, out, _ = run(capsys, "check", "--db", database, *pair, "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["gold"]["rows"][0] == ["Ann", 25]
    assert (shown["verdicts"]["strict"]["score"], shown["verdicts"]["official"]["score"]) == (1, 0)
    assert shown["verdicts"]["strict"]["reason"] == "in another order within ties"
    code, out, _ = run(capsys, "check", "--db", database.parent, *pair)
    assert code == 0 and "strict   1  match (in another order within ties)" in out


def test_check_shows_hostile_values_harmlessly(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = folder / "db" / "office" / "office.sqlite"
    gold = "SELECT last, raw, char(27) || '[2J[bold]' FROM person ORDER BY id"
    code, out, _ = run(capsys, "check", "--db", database, "--gold", gold, "--pred", "")
    assert code == 0 and "\x1b" not in out
    for part in ("Mu\\udcf1oz", "x'00ff'", "'NULL'", "\\x1b[2J[bold]", "pred: refused"):
        assert part in out
    code, out, _ = run(capsys, "check", "--db", database, "--gold", "SELECT nope", "--pred", "SELECT 1", "--json")
    assert code == 0
    assert json.loads(out)["verdicts"]["strict"] == {
        "score": None,
        "kind": "unscorable",
        "error": "gold_error",
        "reason": "no such column: nope [office.sqlite]",
        "vacuous": False,
    }


def test_check_without_a_database_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for database in (folder / "none.sqlite", folder / "gold.sql", folder / "db"):
        code, out, err = run(capsys, "check", "--db", database, "--gold", "SELECT 1", "--pred", "SELECT 1")
        assert (code, out, err.count("\n")) == (2, "", 1)
