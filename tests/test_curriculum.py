"""Phases, difficulty, adaptive sampling and adversarial variants: what a step trains on follows from seed and kept state."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight import presets
from slurmlight.agents.contract import SqlTask
from slurmlight.data import adversarial, difficulty
from slurmlight.errors import UserError
from slurmlight.rewards.sql import execution_match
from slurmlight.sql.schema import read_schema
from slurmlight.train.embedded.course import Course, Drawn, jobs_of
from slurmlight.train.rollouts.play import Job, Played
from tests import sqlbed

EASY, MEDIUM, HARD = (
    "SELECT name FROM emp",
    "SELECT name FROM emp WHERE age > 30 ORDER BY age",
    "SELECT name FROM emp WHERE age > (SELECT avg(age) FROM emp)",
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sqlbed.build(tmp_path_factory.mktemp("course") / "bed.sqlite")


def task(number: int, gold: str, database: Path = Path("bed.sqlite"), question: str = "List the name of all emp.") -> SqlTask:
    return SqlTask(f"train/{number}", question, "bed", database, gold)


TASKS = [task(number, gold) for number, gold in enumerate([EASY] * 6 + [MEDIUM] * 6 + [HARD] * 6)]


def course(curriculum: str, *overrides: str, tasks: list[SqlTask] = TASKS, folder: Path = Path("nowhere")) -> Course:
    settings = [
        f"curriculum={curriculum}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        *overrides,
    ]
    return Course(tasks, presets.load("tiny", settings), folder)


def indices(drawn: Drawn) -> list[int]:
    return [index for index, _ in drawn]


def played(rewards: list[float | None]) -> list[Played]:
    return [Played(Job("", {}, True), reward, error="" if reward is not None else "lost") for reward in rewards]


def test_difficulty_of_the_golds() -> None:
    assert [difficulty.by_hardness(sql) for sql in (EASY, MEDIUM, HARD)] == [0.25, 0.5, 0.75]


def test_difficulty_by_solve_rate_starts_at_the_golds_and_follows_what_is_measured() -> None:
    assert difficulty.by_solve_rate(0.5, 0, 0) == 0.5
    assert difficulty.by_solve_rate(0.5, 8, 8) == pytest.approx(1 - 9 / 10)
    assert difficulty.by_solve_rate(0.25, 8, 0) == pytest.approx(1 - 1.5 / 10)


def test_mixed_outcomes_are_worth_most() -> None:
    assert difficulty.mixedness(0, 0) == pytest.approx(1.05)
    assert difficulty.mixedness(8, 4) == pytest.approx(1.05)
    assert difficulty.mixedness(8, 0) == pytest.approx(0.05 + 4 * 0.09)
    assert difficulty.mixedness(8, 8) == pytest.approx(0.05 + 4 * 0.09)
    assert difficulty.mixedness(98, 0) == pytest.approx(0.05 + 4 * 0.0099)


def test_phases_have_their_ceiling_and_length_and_the_last_goes_on() -> None:
    made = course("[{difficulty=0.3,rounds=2},{difficulty=0.6,steps=3},{}]")
    phases = []
    for step in range(1, 12):
        drawn = indices(made.draw(step))
        assert len(set(drawn)) == 4
        phases.append((made.metrics()["curriculum/phase"], made.metrics()["curriculum/tasks"], max(drawn)))
    assert [phase for phase, _, _ in phases] == [1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3]  # a round of 6 tasks is one batch of 4
    assert [count for _, count, _ in phases] == [6, 6, 12, 12, 12, 18, 18, 18, 18, 18, 18]
    assert max(largest for phase, _, largest in phases if phase == 1) < 6
    assert max(largest for phase, _, largest in phases if phase == 2) < 12


def test_without_phases_the_order_is_that_of_before() -> None:
    made = course("[]")
    assert made.metrics() == {} and made.kept(3)["course"] == {}
    assert [indices(made.draw(step)) for step in (1, 2, 5)] == [made.order.tasks(step) for step in (1, 2, 5)]


@pytest.mark.parametrize(
    ("curriculum", "overrides", "says"),
    [
        ("[{difficulty=0.1,steps=1},{}]", [], "phase 1 has no tasks: difficulty=0.1 and easy questions have 0.25"),
        ("[{steps=1,rounds=1},{}]", [], "a length in rounds and in steps"),
        ("[{difficulty=0.3},{}]", [], "phase 1 has no length"),
        ("[]", ["sampling.difficulty=solve_rate"], "has no curriculum"),
        ("[{difficulty=0.3,steps=1},{}]", ["data.train_batch_size=8"], "phase 1 has 6 tasks up to difficulty 0.3, fewer than"),
        ("[{difficulty=1.5}]", [], "difficulty"),
    ],
)
def test_a_curriculum_without_tasks_or_end_is_refused(curriculum: str, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        course(curriculum, *overrides)


def test_verl_draws_its_own_tasks() -> None:
    for override in ("curriculum=[{}]", "sampling.prefer_mixed=true"):
        with pytest.raises(UserError, match="verl's own data loader"):
            presets.load("qwen", [override])


def test_a_phase_by_solve_rate_takes_what_was_solved() -> None:
    made = course("[{steps=1},{difficulty=0.2,steps=1},{}]", "sampling.difficulty=solve_rate")
    drawn = made.draw(1)
    made.note(drawn, played([1.0, 1.0] + [0.0, 0.0] * 3))  # the first task is solved twice: 1 - (2 + 2 (1 - d)) / 4
    first = indices(drawn)[0]
    assert made.state.tried[first] == 2 and made.state.solved[first] == 2
    chosen = indices(made.draw(2))
    assert first in chosen and len(chosen) == 4, "fewer than a batch are filled up with the easiest"


def test_failed_episodes_say_nothing_of_a_task() -> None:
    made = course("[{}]")
    drawn = made.draw(1)
    made.note(drawn, played([None, 0.0] * 4))
    assert sum(made.state.tried) == 4 and sum(made.state.solved) == 0


def test_adaptive_sampling_prefers_tasks_with_mixed_outcomes() -> None:
    made = course("[]", "sampling.prefer_mixed=true")
    made.draw(1)
    made.state.tried = [40] * 18
    made.state.solved = [0.0] * 6 + [20.0] * 6 + [40.0] * 6
    drawn = Counter(index // 6 for step in range(2, 200) for index in indices(made.draw(step)))
    assert drawn[1] > 2 * drawn[0] and drawn[1] > 2 * drawn[2]
    assert drawn[0] and drawn[2], "none is given up"


@given(st.integers(1, 11), st.booleans(), st.sampled_from(["hardness", "solve_rate"]), st.integers(0, 3))
def test_a_course_taken_up_anywhere_draws_the_same(at: int, mixed: bool, by: str, seed: int) -> None:
    """Kept after any step, in the middle of any phase, through JSON as a checkpoint would."""
    settings = (
        "[{difficulty=0.3,steps=3},{difficulty=0.6,rounds=1},{}]",
        f"sampling.prefer_mixed={str(mixed).lower()}",
        f"sampling.difficulty={by}",
        f"engine.seed={seed}",
    )
    whole, rng, kept, expected = course(*settings), random.Random(seed), {}, []
    outcomes = {step: [float(rng.random() < 0.5) for _ in range(8)] for step in range(1, 13)}
    for step in range(1, 13):
        drawn = whole.draw(step)
        expected.append(indices(drawn))
        whole.note(drawn, played(list(outcomes[step])))
        if step == at:
            kept = json.loads(json.dumps(whole.kept(step)))
    resumed = course(*settings)
    resumed.take_up(kept["course"])
    for step in range(at + 1, 13):
        drawn = resumed.draw(step)
        assert indices(drawn) == expected[step - 1]
        resumed.note(drawn, played(list(outcomes[step])))
    assert resumed.kept(12) == whole.kept(12)


def test_episodes_of_a_step_have_names_and_seeds_of_their_own() -> None:
    jobs = jobs_of(course("[]").draw(1), 3, seed=0, step=1, name="1")
    assert len({job.name for job in jobs}) == len({job.input["seed"] for job in jobs}) == 12


# adversarial variants


def made_of(kind: str, one: SqlTask, folder: Path) -> SqlTask | None:
    maker = adversarial._with_column if kind == "column" else adversarial._with_value
    return maker(one, folder, random.Random(0))


def test_a_question_is_reworded_but_keeps_names_numbers_and_values() -> None:
    question = "How many emp have an age at least 30 and dept A?"
    for seed in range(20):
        changed = adversarial.reworded(question, random.Random(seed))
        assert changed != question
        assert all(word in changed for word in ("emp", "age", "30", "dept A"))
        assert "at least" not in changed and "How many" not in changed
    assert adversarial.reworded("No known words here", random.Random(0)) != "No known words here"


def test_a_renamed_column_is_renamed_in_the_gold_too(database: Path, tmp_path: Path) -> None:
    one = task(1, "SELECT name FROM emp WHERE salary > 5 OR dept = 'salary'  -- salary", database)
    made = made_of("column", one, tmp_path)
    assert made is not None and made.database != database
    columns = {column.name for table in read_schema(made.database) for column in table.columns}
    before = {column.name for table in read_schema(database) for column in table.columns}
    assert len(before - columns) == len(columns - before) == 1
    assert execution_match(made.gold, made.gold, [made.database]).score == 1
    assert sqlbed.sha256(database) == sqlbed.sha256(sqlbed.build(tmp_path / "again.sqlite")), "the original is untouched"


def test_names_are_replaced_and_literals_are_not() -> None:
    sql = "SELECT Salary, e.\"salary\" FROM emp e WHERE x = 'salary' -- salary"
    assert adversarial.renamed(sql, "salary", "slry") == "SELECT slry, e.slry FROM emp e WHERE x = 'salary' -- salary"


def test_a_misleading_value_lies_where_it_does_not_belong(database: Path, tmp_path: Path) -> None:
    one = task(2, "SELECT age FROM emp WHERE dept = 'B'", database)
    made = made_of("value", one, tmp_path)
    assert made is not None and made.gold == one.gold
    shown = {
        column.name: column.samples for table in read_schema(made.database) if table.name == "emp" for column in table.columns
    }
    assert "'B'" in shown["name"], "the first row's name now says B"


def test_where_nothing_can_be_changed_the_question_is(database: Path, tmp_path: Path) -> None:
    one = task(3, "SELECT 1", database)
    assert made_of("column", one, tmp_path) is None and made_of("value", one, tmp_path) is None
    variants = [adversarial.variant(one, tmp_path, seed) for seed in range(5)]
    assert all(made.task_id == "train/3+question" and made.database == database for made in variants)


def test_variants_of_two_instances_change_both_alike(database: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.sqlite"
    second.write_bytes(database.read_bytes())
    one = SqlTask("t/1", "Who?", "bed", database, "SELECT name FROM emp WHERE age > 30", extra={"instances": [str(second)]})
    made = made_of("column", one, tmp_path / "made")
    assert made is not None and len(made.extra["instances"]) == 1
    assert execution_match(made.gold, made.gold, [made.database, Path(made.extra["instances"][0])]).score == 1


@given(st.integers(0, 30))
def test_variants_follow_from_task_and_seed(seed: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        database = sqlbed.build(Path(scratch, "bed.sqlite"))
        one = task(4, "SELECT name, age FROM emp WHERE dept = 'A' ORDER BY age", database, "Which emp have dept A?")
        first, again = (adversarial.variant(one, Path(scratch, place), seed) for place in ("one", "two"))
        assert (first.question, first.gold, first.task_id) == (again.question, again.gold, again.task_id)
        assert execution_match(first.gold, first.gold, [first.database]).score == 1
        if first.database != database:
            assert sqlbed.sha256(first.database) == sqlbed.sha256(again.database)


def test_the_adversarial_phase_trains_on_variants(database: Path, tmp_path: Path) -> None:
    tasks = [task(number, "SELECT name FROM emp WHERE dept = 'A'", database) for number in range(8)]
    made = course("[{steps=1},{adversarial=true}]", tasks=tasks, folder=tmp_path)
    assert all(one is tasks[index] for index, one in made.draw(1))
    drawn = made.draw(2)
    assert all("+" in one.task_id and one.task_id.startswith(tasks[index].task_id) for index, one in drawn)
