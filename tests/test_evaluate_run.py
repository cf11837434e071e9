"""Evaluations in this process, against a scripted server: every question once, failures apart, measures never mixed."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from slurmlight import evaljobs, evaluating, presets
from slurmlight.cli import build
from slurmlight.errors import UserError
from slurmlight.evaluate import run as harness
from slurmlight.evaluate.store import read_parts
from slurmlight.evaluating import Asked, configure
from slurmlight.files import read_json, write_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder, StopRequest
from tests.evalbed import Scripted, evaluate, prepared, replay, run_payload, write_questions

COLOURS = ("red", "blue", "green", "grey", "black", "white")
RIGHT = {f"How many cats are {colour}?": f"SELECT count(*) FROM cat WHERE colour = '{colour}'" for colour in COLOURS}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with six questions on one database, and short pauses between tries."""
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    monkeypatch.setattr(harness, "PAUSE_S", 0.01)
    monkeypatch.setattr("slurmlight.agents.chat.MAX_RETRIES", 0)
    (tmp_path / "q/database/cats").mkdir(parents=True)
    with sqlite3.connect(tmp_path / "q/database/cats/cats.sqlite") as database:
        database.execute("create table cat (name text, colour text)")
        database.executemany("insert into cat values (?, ?)", [(str(n), COLOURS[n % 5]) for n in range(20)])
    write_questions(tmp_path / "q", [{"question": question, "db_id": "cats", "query": sql} for question, sql in RIGHT.items()])
    return tmp_path


def asked(home: Path, server: Scripted, **more: Any) -> Asked:
    given: dict[str, Any] = {"preset": "fast", "endpoint": server.url, "model": "m", "name": "e", "in_flight": 2}
    return Asked(**(given | {"data": str(home / "q/questions.parquet")} | more))


def summary(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.path / "report/summary.json") or {}


def failing(words: str, times: int = 10**9) -> Callable[[list[dict[str, str]]], str | None]:
    """Like replay of the right queries, but status 500 for questions with ``words`` (the first ``times`` calls)."""
    good, left = replay(RIGHT), [times]

    def answer(messages: list[dict[str, str]]) -> str | None:
        if words in json.dumps(messages) and left[0]:
            left[0] -= 1
            return None
        return good(messages)

    return answer


def test_a_perfect_policy_scores_all_and_every_answer_is_kept(home: Path) -> None:
    with Scripted(replay(RIGHT)) as server:
        code, folder = evaluate(asked(home, server))
    found = summary(folder)
    assert code == 0 and found["complete"] and folder.finished()
    assert found["measure"] == "greedy accuracy"
    assert all(
        found["evaluators"][one]["right"] == found["evaluators"][one]["questions"] == 6 for one in ("strict", "official")
    )
    assert pq.read_table(folder.path / "report/answers.parquet").num_rows == 6
    status = folder.status()
    assert status and (status.step, status.total_steps, status.validation) == (6, 6, 1.0)


def test_a_stop_keeps_what_was_answered_and_the_next_attempt_asks_the_rest(home: Path) -> None:
    with Scripted(replay(RIGHT), delay_s=0.3) as server:
        folder = prepared(asked(home, server))
        folder.request_stop(StopRequest("preemption", 1))
        assert run_payload(folder) == 75
        first = {one.key for one in read_parts(folder.path)}
        assert len(first) < 6 and not folder.finished()
        asked_before = server.asked.total()
        assert run_payload(folder) == 0
    answers = read_parts(folder.path)
    assert [one.key for one in answers] == [(index, 0) for index in range(6)]
    assert {one.key for one in answers if one.attempt == 1} == first
    assert server.asked.total() - asked_before == 1 + 2 * (6 - len(first)), "a probe, then a query and its check a question"


def test_what_infrastructure_lost_is_tried_again_then_listed_apart_and_asked_by_the_next_launch(home: Path) -> None:
    with Scripted(failing("grey")) as server:
        code, folder = evaluate(asked(home, server))
        found = summary(folder)
        assert code == 3 and not found["complete"] and (found["answered"], found["lost"]) == (5, 1)
        assert found["evaluators"]["strict"]["accuracy"] == 1.0, "a lost episode is no wrong answer"
        assert found["lost_examples"][0]["index"] == 3 and "500" in found["lost_examples"][0]["why"]
        assert "Partial" in (folder.path / "report/report.html").read_text()
        tries = sum(count for text, count in server.asked.items() if "grey" in text)
        assert tries == harness.TRIES
        server.answer = replay(RIGHT)
        code, folder = evaluate(asked(home, server))
    assert code == 0 and summary(folder)["complete"]
    assert [one.index for one in read_parts(folder.path)] == list(range(6))


def test_a_partial_evaluation_needs_no_requeue_but_whoever_starts_it_asks_the_rest(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Scripted(failing("grey")) as server:
        code, folder = evaluate(asked(home, server))
        assert code == 3 and folder.finished(), "the supervisor does not come back for it"
        assert run_payload(folder) == 1 and folder.finished(), "nor where the server still fails"
        server.answer = replay(RIGHT)
        assert run_payload(folder) == 0 and summary(folder)["complete"]
        count = server.asked.total()
        assert run_payload(folder) == 0 and server.asked.total() == count
    assert capfd.readouterr().out.count("nothing to do") == 1
    assert [one.index for one in read_parts(folder.path)] == list(range(6))


def test_an_episode_that_fails_once_counts_as_any_other(home: Path) -> None:
    with Scripted(failing("grey", times=1)) as server:
        code, folder = evaluate(asked(home, server))
    assert code == 0 and summary(folder)["evaluators"]["strict"]["right"] == 6


def test_a_server_that_dies_midway_leaves_a_partial_report_and_nothing_is_asked_twice(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "GONE_AFTER", 2)
    good = replay(RIGHT)

    def answer(messages: list[dict[str, str]]) -> str | None:
        if server.asked.total() == 6:  # a probe, then a query and its check a question
            server.die()
        return good(messages)

    with Scripted(answer) as server:
        flags = asked(home, server, in_flight=1)
        code, folder = evaluate(flags)
    found = summary(folder)
    assert code == 1 and 0 < found["answered"] < 6 and not found["complete"] and not folder.finished()
    assert evaljobs.code_of(folder, code) == 3, "slurmlight eval and eval.sbatch end as partial"
    assert "in a row were lost" in capfd.readouterr().err
    answered = read_parts(folder.path)
    assert len(answered) == found["answered"]

    with Scripted(good, port=server.port) as again:
        assert evaluate(flags)[0] == 0
    assert summary(folder)["complete"] and [one.index for one in read_parts(folder.path)] == list(range(6))
    assert not [one.question for one in answered if any(one.question in text for text in again.asked)]


def test_a_server_that_refuses_template_settings_is_asked_without_them(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Scripted(replay(RIGHT), refused="chat_template_kwargs") as server:
        code, folder = evaluate(asked(home, server))
    assert code == 0 and summary(folder)["evaluators"]["strict"]["right"] == 6
    assert "refuses chat_template_kwargs" in capfd.readouterr().out


def test_a_server_that_refuses_more_than_that_is_named(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Scripted(replay(RIGHT), refused="model") as server:
        assert evaluate(asked(home, server))[0] == 2
    assert "refuses a completion of 'm' with status 400" in capfd.readouterr().err


def test_samples_are_a_measure_of_their_own(home: Path) -> None:
    """Questions about red cats are answered right every other time, all others always."""
    good, wrong, turn = replay(RIGHT), replay({}), [0]

    def answer(messages: list[dict[str, str]]) -> str | None:
        reviews = "You review" in messages[0]["content"]
        turn[0] += "are red" in messages[-1]["content"] and not reviews
        return wrong(messages) if "are red" in messages[-1]["content"] and turn[0] % 2 else good(messages)

    with Scripted(answer) as server:
        code, folder = evaluate(asked(home, server, samples=4, temperature=1.0))
    found = summary(folder)["evaluators"]["strict"]
    answers = read_parts(folder.path)
    assert code == 0 and len(answers) == 24 and len({one.key for one in answers}) == 24
    assert "accuracy" not in found and found["mean@4"] == pytest.approx(sum(one.strict or 0 for one in answers) / 24)
    assert found["pass@4"] == sum(any(one.strict for one in answers if one.index == index) for index in range(6)) / 6
    assert (found["mean@4"], found["pass@4"]) == (pytest.approx(22 / 24), 1.0)
    text = (folder.path / "report/report.md").read_text()
    assert "mean@4 at temperature 1" in text and "pass@4" in text and "greedy" not in text


def test_two_evaluations_are_compared_question_by_question(home: Path) -> None:
    before = RIGHT | {"How many cats are red?": "SELECT 77", "How many cats are blue?": "SELECT 77"}
    now = RIGHT | {"How many cats are green?": "SELECT 77", "How many cats are red?": "SELECT 77"}
    with Scripted(replay(before)) as server:
        evaluate(asked(home, server, name="before"))
        server.answer = replay(now)
        code, folder = evaluate(asked(home, server, name="now", against="before"))
    found = summary(folder)["against"]["evaluators"]["strict"]
    assert code == 0 and ([one["index"] for one in found["won"]], [one["index"] for one in found["lost"]]) == ([1], [2])
    assert found["p"] == 1.0 and (found["right_before"], found["right_now"]) == (4, 4)


def test_unlike_measures_are_never_compared(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Scripted(replay(RIGHT)) as server:
        evaluate(asked(home, server, name="greedy"))
        code, _ = evaluate(asked(home, server, name="sampled", samples=2, temperature=1.0, against="greedy"))
        assert code == 2 and "two different measures" in capfd.readouterr().err
        code, _ = evaluate(asked(home, server, name="fewer", limit=3, against="greedy"))
        assert code == 2 and "other questions" in capfd.readouterr().err
        before = evaluating.folder_of(configure(asked(home, server)), "greedy")
        write_json(before.config, (read_json(before.config) or {}) | {"instances": 4})
        code, _ = evaluate(asked(home, server, name="again", against="greedy"))
        assert code == 2 and "judged on 4 instances of each database, this on 1" in capfd.readouterr().err


def test_changed_questions_are_not_mixed_with_old_answers(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Scripted(failing("grey")) as server:
        assert evaluate(asked(home, server))[0] == 3
        write_questions(home / "q", [{"question": "How many?", "db_id": "cats", "query": "SELECT 1"}])
        assert evaluate(asked(home, server))[0] == 2
    assert "has changed since" in capfd.readouterr().err


def test_a_gold_that_fails_is_no_wrong_answer(home: Path) -> None:
    rows = [{"question": question, "db_id": "cats", "query": sql} for question, sql in RIGHT.items()]
    write_questions(home / "q", [*rows, {"question": "How many dogs?", "db_id": "cats", "query": "SELECT count(*) FROM dog"}])
    with Scripted(replay(RIGHT)) as server:
        code, folder = evaluate(asked(home, server))
    found = summary(folder)
    assert code == 0 and found["unscorable"] == {"gold_error": 1} and found["evaluators"]["strict"]["questions"] == 6


def test_the_key_comes_from_the_environment_and_goes_to_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-0123456789")
    with Scripted(replay(RIGHT)) as server:
        code, folder = evaluate(asked(home, server))
    assert code == 0 and server.keys == {"Bearer sk-secret-0123456789"}
    assert not [path for path in folder.path.rglob("*") if path.is_file() and b"sk-secret" in path.read_bytes()]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"samples": 4, "temperature": 0.0}, "equal answers"),
    ({"temperature": 3.0}, "out of range"),
    ({"endpoint": "host:8000"}, "is no URL"),
    ({"endpoint": "http://me:pw@host/v1"}, "--endpoint holds a user or password"),
    ({"model": None}, "needs the name of the model"),
    ({"endpoint": None}, "--model names the model"),
    ({"baseline": True}, "each say what is evaluated"),
    ({"run": "some"}, "are both given"),
    ({"data": "nowhere.parquet"}, "does not exist"),
    ({"preset": "quen"}, "did you mean"),
    ({"against": "nothing"}, "unknown run"),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_flags_are_refused_before_anything_is_submitted(home: Path, flags: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"preset": "fast", "endpoint": "http://127.0.0.1:9/v1", "model": "m", "name": "e"}
    with pytest.raises(UserError, match=words):
        configure(Asked(**given | {"data": str(home / "q/questions.parquet")} | flags))


def test_a_run_without_checkpoints_is_refused_in_one_line(home: Path) -> None:
    done = CliRunner().invoke(build(), ["eval"])
    assert isinstance(done.exception, UserError) and "has a complete checkpoint" in str(done.exception)


@pytest.fixture
def torn(home: Path) -> Path:
    """A training run whose only checkpoint is torn."""
    run = home / "checkpoints/torn"
    (run / "global_step_3/actor").mkdir(parents=True)
    write_json(run / "config.json", presets.to_json(presets.load("tiny")))
    return run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, r"run torn has no complete checkpoint \(step 3: .*--baseline"),
        ({"step": 3}, "step 3 of run torn is not complete: "),
        ({"step": 7}, r"run torn has no checkpoint of step 7 \(steps there: 3\)"),
    ],
)
def test_a_run_without_a_whole_checkpoint_is_refused_before_anything_is_submitted(
    home: Path, torn: Path, flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        configure(Asked(run="torn", data=str(home / "q/questions.parquet"), **flags))


@pytest.mark.parametrize(
    ("flags", "words"),
    [({}, "run torn has no complete checkpoint (step 3: "), ({"baseline": True}, "models/tiny has no config.json")],
    ids=["no checkpoint", "no base model"],
)
def test_a_job_that_finds_no_model_ends_with_2_and_names_it(
    home: Path, torn: Path, flags: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configure(Asked(run="torn", data=str(home / "q/questions.parquet"), **flags), later=True)
    folder = evaluating.folder_of(config, None)
    evaluating.prepare(config, JobPlan(folder.name, str(folder.path), str(home), "local", "tiny", ("true",)), fresh=False)
    assert run_payload(folder) == 2
    said = capfd.readouterr().err
    assert words in said and len(said.splitlines()) == 1


def test_a_database_that_goes_away_costs_the_questions_left_not_the_answers(home: Path) -> None:
    good = replay(RIGHT)

    def answer(messages: list[dict[str, str]]) -> str | None:
        if server.asked.total() == 6:
            os.rename(home / "q/database/cats", home / "q/database/gone")
        return good(messages)

    with Scripted(answer) as server:
        code, folder = evaluate(asked(home, server, in_flight=1))
    found = summary(folder)
    assert code == 3 and 0 < found["answered"] < 6 and found["answered"] + found["lost"] == 6
    assert "cats" in found["lost_examples"][0]["why"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"question": "a?", "db_id": "cats", "query": " "}], "must be text"),
        ([{"question": "a?", "db_id": "dogs", "query": "SELECT 1"}], "no usable database"),
    ],
    ids=["no gold", "no database"],
)
def test_bad_data_end_with_2_and_name_the_file(
    home: Path, rows: list[dict[str, Any]], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_questions(home / "q", rows)
    with Scripted(replay({})) as server:
        assert evaluate(asked(home, server))[0] == 2
    said = capfd.readouterr().err
    assert words in said and "questions.parquet" in said and len(said.splitlines()) == 1


def test_another_evaluation_in_the_folder_is_not_overwritten(home: Path) -> None:
    with Scripted(replay(RIGHT)) as server:
        evaluate(asked(home, server))
        with pytest.raises(UserError, match=r"another evaluation .*limit"):
            evaluate(asked(home, server, limit=2))


def test_a_server_that_is_not_there_is_named(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Scripted(replay(RIGHT)) as server:
        flags = asked(home, server)
    assert evaluate(flags)[0] == 1
    assert "no completion from http://127.0.0.1" in capfd.readouterr().err


def test_ask_shows_the_steps_and_the_rows(home: Path) -> None:
    database = home / "q/database/cats/cats.sqlite"
    with Scripted(replay(RIGHT)) as server:
        flags = ["--preset", "fast", "--endpoint", server.url, "--model", "m", "--db", str(database)]
        done = CliRunner().invoke(build(), ["ask", "How many cats are red?", *flags])
    assert done.exit_code == 0, done.output
    assert "1. write" in done.output and "colour = 'red'" in done.output and "2. check" in done.output
    assert done.output.splitlines()[-3:] == ["count(*)", "4", "(1 rows)"]
    assert os.path.getsize(database) > 0
