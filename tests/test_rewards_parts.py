"""Rewards by hand-computed values; composition is linear; ranges hold; a reward of one's own never lets NaN through."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight import presets
from slurmlight.agents.contract import Episode, SqlTask, Turn
from slurmlight.errors import UserError
from slurmlight.presets.learning import RewardPart
from slurmlight.rewards import compose, overlap, parts, user
from slurmlight.rewards.catalogue import REWARDS
from slurmlight.rewards.judged import Judged
from slurmlight.rewards.sql import Verdict, execution_match
from slurmlight.sql.schema import read_schema
from slurmlight.train.rollouts.sql_player import learned, make_judge
from tests import sqlbed
from tests.shared import REPOSITORY


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sqlbed.build(tmp_path_factory.mktemp("rewards") / "bed.sqlite")


def turn(node: str, sql: str = "", outcome: str = "", text: str | None = None, prompt: str = "?", tokens: int = 10) -> Turn:
    messages = [{"role": "user", "content": prompt}]
    return Turn(node, node != "check", messages, sql if text is None else text, sql, outcome, completion_tokens=tokens)


def played(*turns: Turn, answer: str = "", seconds: float = 1.0, max_turns: int = 3) -> Episode:
    task = SqlTask("t/0", "Who is 40?", "bed", Path("bed.sqlite"), max_turns=max_turns)
    return Episode(task, answer or next((one.sql for one in reversed(turns) if one.outcome), ""), turns, seconds)


def judged(episode: Episode, gold: str = "SELECT 1", database: Path | None = None, error: str = "", score: int = 0) -> Judged:
    if database is not None:
        verdict = execution_match(gold, episode.answer, [database])
    else:
        verdict = Verdict(1 if score else 0, "match" if score else "rows", "", False, "strict", error)
    return Judged(episode, gold, verdict, (database,) if database else (), max_tokens=100, timeout_s=20.0)


def test_every_reward_is_in_the_catalogue_and_documented() -> None:
    assert set(parts.REGISTRY) == set(REWARDS)
    page = (Path(__file__).parents[1] / "docs/learning.md").read_text()
    assert [name for name in REWARDS if f"`{name}`" not in page] == []


def test_syntax_is_about_the_parser_and_not_about_names(database: Path) -> None:
    for sql, value in (
        ("SELECT name FROM emp", 1.0),
        ("SELECT nonsense FROM nowhere", 1.0),
        ("SELECT name FROM", 0.0),
        ("DROP TABLE emp", 0.0),
        ("SELECT 1; SELECT 2", 0.0),
        ("SELECT randomblob(5)", 1.0),
        ("", 0.0),
    ):
        episode = played(turn("write", sql, "rows"), answer=sql)
        assert parts.syntax(judged(episode, "SELECT id FROM emp", database)) == value, sql


def test_similarity_is_the_overlap_of_results(database: Path) -> None:
    """Ages in the bed: 30 40 40 50 25."""
    gold = "SELECT name, age FROM emp WHERE age >= 40"  # (Bob 40) (Cid 40) (Dee 50)
    for sql, value in (
        (gold, 1.0),
        ("SELECT name, age FROM emp WHERE age > 40", 1 / 3),
        ("SELECT age, name FROM emp WHERE age >= 30", 3 / 4),  # columns in another order
        ("SELECT name FROM emp WHERE age >= 40", 3 / 6),  # values: Bob Cid Dee of Bob Cid Dee 40 40 50
        ("SELECT name, age FROM emp WHERE age > 90", 0.0),
        ("SELECT name, age FROM", 0.0),
    ):
        episode = played(turn("write", sql, "rows"), answer=sql)
        assert parts.execution_similarity(judged(episode, gold, database)) == pytest.approx(value), sql


def test_similarity_of_a_wrong_order_stays_below_a_match(database: Path) -> None:
    sql = "SELECT name FROM emp ORDER BY age DESC"
    episode = played(turn("write", sql, "rows"), answer=sql)
    assert parts.execution_similarity(judged(episode, "SELECT name FROM emp ORDER BY age", database)) == 0.9


def test_schema_linking_counts_names_of_tables_and_columns(database: Path) -> None:
    gold = "SELECT name FROM emp WHERE age > 30"  # emp name age
    for sql, value in (
        ("SELECT Name FROM EMP WHERE AGE < 5", 1.0),
        ("SELECT name FROM emp WHERE dept = 'age'", 2 / 4),  # a literal is no name
        ("SELECT x FROM num", 0.0),
        ("", 0.0),
    ):
        assert parts.schema_linking(judged(played(turn("write", sql, "rows"), answer=sql), gold, database)) == value, sql
    assert overlap.linked('SELECT "name", [raw] FROM person', read_schema(database)) == {"name", "raw", "person"}


def test_efficiency_and_speed() -> None:
    one = played(turn("write", "SELECT 1", "rows", tokens=30))
    assert parts.efficiency(judged(one)) == pytest.approx((1.0 + 0.9) / 2)  # 30 of 3 x 100 tokens
    two = played(turn("write", "SELECT 2", "empty", tokens=60), turn("rewrite", "SELECT 1", "rows", tokens=90))
    assert parts.efficiency(judged(two)) == pytest.approx((0.5 + 0.5) / 2)
    assert parts.speed(judged(played(seconds=5.0))) == 0.75
    assert parts.speed(judged(played(seconds=500.0))) == 0.0


def test_process_judges_each_call_by_what_executing_gave() -> None:
    good = played(turn("write", "SELECT a", "error"), turn("rewrite", "SELECT 1", "rows"))
    assert parts.call_scores(good) == [0.0, 1.0]
    assert parts.process(judged(good)) == 0.5
    stubborn = played(
        turn("write", "SELECT a", "error"), turn("rewrite", "SELECT a", "error"), turn("rewrite", "SELECT 2", "empty")
    )
    assert parts.call_scores(stubborn) == [0.0, 0.0, 0.5]
    asked = played(turn("write", "SELECT 2", "empty"), turn("check"), turn("rewrite", "SELECT 1", "rows"), turn("check"))
    assert parts.call_scores(asked) == [0.5, 1.0, 1.0, 1.0]
    careless = played(turn("write", "SELECT 2", "empty"), turn("check"))
    assert parts.call_scores(careless) == [0.5, 0.0]
    critical = played(turn("write", "SELECT 1", "rows"), turn("check"), turn("rewrite", "SELECT 2", "rows"))
    assert parts.call_scores(critical) == [1.0, 0.5, 1.0]
    assert parts.process(judged(played(turn("write", "SELECT 1", "rows"), answer="SELECT 9"))) == 0.0, "an answer never run"
    assert parts.process(judged(played())) == 0.0


def test_scores_of_calls_follow_the_calls_that_the_gateway_keeps() -> None:
    episode = played(
        turn("write", "SELECT a", "error", prompt="first"),
        turn("rewrite", "SELECT a", "error", prompt="again"),
        turn("rewrite", "SELECT 1", "rows", prompt="again"),
        turn("check", prompt="check"),
    )
    assert learned(episode) == [0.0, 1.0], "of two calls with one prompt the last; a check that does not learn is none"


def test_format_is_one_query_and_nothing_else() -> None:
    for text, value in (
        ("SELECT 1", 1.0),
        ("  select name from emp ;\n", 1.0),
        ("```sql\nSELECT 1\n```", 1.0),
        ("Here it is:\n```sql\nSELECT 1\n```", 0.0),
        ("SELECT 1\n\nThis counts everything.", 0.0),
        ("I cannot say.", 0.0),
        ("", 0.0),
    ):
        assert parts.format_(judged(played(turn("write", "SELECT 1", "rows", text=text)))) == value, text


def composition(**weights: float) -> compose.Composition:
    return compose.compose([RewardPart(name=name, weight=weight) for name, weight in weights.items()])


def test_the_documented_mixes_by_hand(database: Path) -> None:
    sql = "SELECT name FROM emp WHERE age > 40"
    episode = played(turn("write", "SELECT nam FROM emp", "error"), turn("rewrite", sql, "rows", tokens=20), answer=sql)
    wrong = judged(episode, "SELECT name FROM emp WHERE age >= 40", database)
    earned = composition(execution_match=0.6, syntax=0.4)(wrong)
    assert earned.parts == {"execution_match": 0.0, "syntax": 1.0}
    assert earned.total == pytest.approx(0.4)
    earned = composition(execution_match=0.6, process=0.3, efficiency=0.1)(wrong)
    assert earned.total == pytest.approx(0.3 * 0.5 + 0.1 * (0.5 + 0.9) / 2)


@pytest.mark.parametrize(("preset", "mix"), [("qwen-syntax", (0.6, 0.4)), ("qwen-process", (0.6, 0.3, 0.1))])
def test_the_ready_presets_carry_the_documented_mixes(preset: str, mix: tuple[float, ...]) -> None:
    loaded = presets.load(preset)
    assert tuple(part.weight for part in loaded.reward) == mix
    assert loaded.reward[0].name == "execution_match"
    assert not make_judge(loaded).rewards.plain


shares = st.floats(0, 1, allow_nan=False)


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(shares, shares, shares), min_size=1), st.floats(0, 1))
def test_composition_is_linear(table: dict[str, tuple[float, float, float]], share: float) -> None:
    weights = {name: weight for name, (weight, _, _) in table.items()}
    one, other = ({name: row[place] for name, row in table.items()} for place in (1, 2))
    mixed = {name: share * one[name] + (1 - share) * other[name] for name in one}
    expected = share * compose.combine(one, weights) + (1 - share) * compose.combine(other, weights)
    assert compose.combine(mixed, weights) == pytest.approx(expected, abs=1e-12)


sqls = st.sampled_from(["", "SELECT 1", "SELECT a", "select name from emp", "```", "SELECT 1; SELECT 2", "no idea"])
turns = st.builds(
    turn,
    st.sampled_from(["write", "check", "rewrite"]),
    sqls,
    st.sampled_from(["", "rows", "empty", "error", "timeout"]),
    sqls,
    st.just("?"),
    st.integers(0, 10_000),
)


@given(
    st.lists(turns, max_size=6), sqls, st.floats(0, 1e6), st.integers(1, 5), st.sampled_from(["", "syntax"]), st.integers(0, 1)
)
def test_every_reward_stays_in_its_range(
    some: list[Turn], answer: str, seconds: float, limit: int, error: str, score: int
) -> None:
    episode = judged(played(*some, answer=answer, seconds=seconds, max_turns=limit), error=error, score=score)
    for name, reward in parts.REGISTRY.items():
        assert REWARDS[name].lowest <= reward(episode) <= 1.0, name
    assert 0.0 <= composition(execution_match=0.6, process=0.3, efficiency=0.1)(episode).total <= 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_overlap_is_symmetric_and_at_most_one(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert overlap.overlap(one, other) == overlap.overlap(other, one) <= 1.0
    assert overlap.overlap(one, one) == float(bool(one))


OWN = """
def short(judged):
    return 1.0 - min(1.0, len(judged.episode.answer) / 100)
def nan(judged):
    return float("nan")
def huge(judged):
    return 7
def raises(judged):
    return judged.no_such_thing
def moody(judged):
    return float("nan") if "moody" in judged.episode.answer else 1.0
def none(): return 1.0
def two(judged, more): return 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "torn.py").write_text("def torn(judged:\n")
    (tmp_path / "breaks.py").write_text("import no_such_package\ndef breaks(judged): return 1.0\n")
    return tmp_path


def part(name: str, file: str = "own.py") -> list[RewardPart]:
    return [RewardPart(name=name, file=file)]


def test_a_reward_of_ones_own(own: Path) -> None:
    compose.rehearse(part("short"), own)
    episode = played(turn("write", "SELECT 1", "rows"))
    assert compose.compose(part("short"), own)(judged(episode)).total == pytest.approx(0.92)


@pytest.mark.parametrize(
    ("name", "file", "says"),
    [
        ("absent", "own.py", "no function of that name (has: huge, moody, nan, none, raises, short, two)"),
        ("none", "own.py", "must take one argument"),
        ("two", "own.py", "must take one argument"),
        ("torn", "torn.py", "is not Python"),
        ("short", "nowhere.py", "cannot be read"),
    ],
)
def test_a_wrong_reward_file_is_refused_before_it_is_run(own: Path, name: str, file: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        user.look_at(own / file, name)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_launch_with_a_wrong_reward_file_submits_nothing(own: Path) -> None:
    mix = 'reward=[{name="absent",file="own.py"}]'
    command = [sys.executable, str(REPOSITORY / "launch.py"), "--preset", "tiny", "--cluster", "local", "--set", mix]
    done = subprocess.run(command, capture_output=True, text=True, cwd=own, env=os.environ | {"SLURMLIGHT_HOME": str(own)})
    assert done.returncode == 2 and "no function of that name" in done.stderr + done.stdout
    assert not (own / "checkpoints").exists()


@pytest.mark.parametrize(
    ("name", "file", "says"),
    [
        ("nan", "own.py", "returned nan, which is no number from -1 to 1, on an episode that went well"),
        ("huge", "own.py", "returned 7"),
        ("raises", "own.py", "raised AttributeError"),
        ("breaks", "breaks.py", "no_such_package"),
    ],
)
def test_a_reward_that_fails_at_once_is_refused_before_training(own: Path, name: str, file: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        compose.rehearse(part(name, file), own)
    assert says in str(refused.value)


def test_a_reward_that_fails_later_fails_its_episode(own: Path) -> None:
    compose.rehearse(part("moody"), own)
    rewards = compose.compose(part("moody"), own)
    with pytest.raises(compose.RewardFailed, match="reward 'moody' returned nan"):
        rewards(judged(played(turn("write", "SELECT 'moody'", "rows"))))


def test_the_judge_of_a_run_gives_such_an_episode_no_reward(own: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLIGHT_HOME", str(own))
    mix = 'reward=[{name="execution_match",weight=0.6},{name="moody",weight=0.4,file="own.py"}]'
    judge = make_judge(presets.load("tiny", [mix]))
    good, bad = ("SELECT name FROM emp", "SELECT name AS moody FROM emp")
    score = judge(played(turn("write", good, "rows")), good, [database])
    assert score.reward == 1.0 and score.parts is not None
    assert score.parts.rewards == {"execution_match": 1.0, "moody": 1.0}
    with pytest.raises(compose.RewardFailed, match="returned nan"):
        judge(played(turn("write", bad, "rows")), good, [database])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('reward=[{name="execution_match",weight=0.6},{name="syntax",weight=0.5}]', "sum to 1.1, not to 1"),
        ('reward=[{name="sintax"}]', "unknown reward 'sintax'; did you mean syntax"),
        ('reward=[{name="syntax",weight=0.5},{name="syntax",weight=0.5}]', "one part twice"),
        ('reward=[{name="syntax",file="x.py"}]', "needs a name of its own"),
        ("reward=[]", "length >= 1"),
        ('reward=[{nam="syntax"}]', "did you mean name"),
    ],
)
def test_a_wrong_mix_is_refused_at_launch(override: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        presets.load("tiny", [override])
    assert says in str(refused.value) and refused.value.exit_code == 2
