"""The SQL agent against a scripted OpenAI-compatible server: its graph, what it tells the model, and what counts as failure."""

from __future__ import annotations

import asyncio
import http.server
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from slurmlight.agents.chat import close_clients
from slurmlight.agents.contract import (
    Channel,
    Endpoint,
    Episode,
    InfrastructureError,
    PromptTooLong,
    Sampling,
    SqlTask,
    call_seed,
)
from slurmlight.agents.prompts import Prompts, cut
from slurmlight.agents.sql import SqlAgent, SqlAgentConfig, verdict
from slurmlight.sql.budget import estimate
from slurmlight.sql.execute import Result

GOOD = "SELECT name FROM customers WHERE city = 'Rome'"
EMPTY = "SELECT name FROM customers WHERE city = 'Oslo'"
WRONG = "SELECT nope FROM customers"


@dataclass
class Script:
    """What the server answers, call by call: a text, or (status, body). ``calls`` holds what it was asked."""

    answers: list[str | tuple[int, str]]
    calls: list[dict[str, Any]] = field(default_factory=list)
    base_url: str = ""


def completion(text: str | None) -> str:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage})


@pytest.fixture
def serve() -> Iterator[Callable[..., Script]]:
    servers = []

    def start(*answers: str | tuple[int, str]) -> Script:
        script = Script(list(answers))

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                script.calls.append({"path": self.path, **body})
                answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
                status, text = (200, completion(answer)) if isinstance(answer, str) else answer
                raw = text.encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *arguments: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        script.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        return script

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def task(tmp_path: Path) -> SqlTask:
    path = tmp_path / "shop.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT)")
    rows = [(n, f"name {n}", "Rome" if n % 2 else "Paris") for n in range(30)]
    connection.executemany("INSERT INTO customers VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return SqlTask("t/1", "Who lives in Rome?", "shop", path, gold="SECRET GOLD")


def endpoint(learn: Script, aux: Script | None = None) -> Endpoint:
    channels = [Channel(script.base_url, "key", "policy") for script in (learn, aux or learn)]
    return Endpoint(*channels, Sampling(temperature=0.7, max_tokens=36, seed=5), timeout_s=20.0)


def play(task: SqlTask, llm: Endpoint, **config: Any) -> Episode:
    async def run() -> Episode:
        try:
            return await SqlAgent(SqlAgentConfig(**config)).solve(task, llm)
        finally:
            await close_clients()

    return asyncio.run(run())


def outcomes(episode: Episode) -> list[tuple[str, str]]:
    return [(turn.node, turn.outcome) for turn in episode.turns]


def test_a_good_first_query_is_one_call(serve, task: SqlTask) -> None:
    script = serve(f"```sql\n{GOOD};\n```")
    episode = play(task, endpoint(script), check="rule")
    assert (episode.answer, outcomes(episode)) == (GOOD, [("write", "rows")])
    turn = episode.turns[0]
    assert (turn.prompt_tokens, turn.completion_tokens, turn.learns, turn.sql) == (7, 3, True, GOOD)
    call = script.calls[0]
    assert (call["path"], call["model"], call["temperature"], call["max_tokens"]) == ("/v1/chat/completions", "policy", 0.7, 36)
    assert call["chat_template_kwargs"] == {"enable_thinking": False}
    assert call["messages"] == turn.prompt


def test_errors_and_empty_results_are_told_and_repaired(serve, task: SqlTask) -> None:
    script = serve(WRONG, EMPTY, GOOD)
    episode = play(task, endpoint(script), check="rule")
    assert outcomes(episode) == [("write", "error"), ("rewrite", "empty"), ("rewrite", "rows")]
    assert episode.answer == GOOD
    second, third = (call["messages"] for call in script.calls[1:])
    assert WRONG in second[-2]["content"] and "no such column: nope" in second[-1]["content"]
    assert EMPTY in third[-2]["content"] and "returned 0 rows. Columns: name" in third[-1]["content"]
    assert WRONG not in json.dumps(third)
    assert [call["seed"] for call in script.calls] == [call_seed(5, number) for number in range(3)]
    assert "SECRET" not in json.dumps(script.calls)


def test_turns_end_and_the_answer_is_the_last_query_that_ran(serve, task: SqlTask) -> None:
    episode = play(task, endpoint(serve(EMPTY, WRONG, "no idea")), check="rule")
    assert outcomes(episode) == [("write", "empty"), ("rewrite", "error"), ("rewrite", "")]
    assert episode.answer == EMPTY
    assert episode.turns[2].message == "the answer holds no SQL query"
    assert play(task, endpoint(serve(WRONG)), check="rule").answer == WRONG
    assert play(task, endpoint(serve("no idea")), check="rule").answer == ""
    assert len(play(replace(task, max_turns=1), endpoint(serve(WRONG)), check="rule").turns) == 1


def test_the_model_checks_results_but_not_errors_nor_the_last_attempt(serve, task: SqlTask) -> None:
    reviews = serve("You forgot something. THE QUERY IS INCORRECT", "Fine: THE QUERY IS CORRECT")
    writes = serve(WRONG, GOOD, f"{GOOD} LIMIT 1")
    episode = play(replace(task, max_turns=4), endpoint(writes, reviews), check="model")
    nodes = [("write", "error"), ("rewrite", "rows"), ("check", ""), ("rewrite", "rows"), ("check", "")]
    assert outcomes(episode) == nodes
    assert [turn.learns for turn in episode.turns] == [True, True, False, True, False]
    assert (len(writes.calls), len(reviews.calls)) == (3, 2)
    shown = reviews.calls[0]["messages"][-1]["content"]
    assert GOOD in shown and "returned 15 rows" in shown and "name 1\n" in shown and "..." in shown
    assert "You forgot something" in writes.calls[2]["messages"][-1]["content"]
    last = play(replace(task, max_turns=1), endpoint(serve(GOOD), serve("must not be asked")), check="model")
    assert outcomes(last) == [("write", "rows")]


@pytest.mark.parametrize(
    ("learn", "goes_to"),
    [(("write", "rewrite"), "LAL"), (("write", "check", "rewrite"), "LLL"), (("check",), "ALA"), ((), "AAA")],
)
def test_which_calls_learn_is_configurable(serve, task: SqlTask, learn: tuple[str, ...], goes_to: str) -> None:
    answers = (GOOD, "THE QUERY IS INCORRECT", GOOD)
    scripts = {
        letter: serve(*[answer for answer, to in zip(answers, goes_to, strict=True) if to == letter] or ["-"])
        for letter in "LA"
    }
    episode = play(replace(task, max_turns=2), endpoint(scripts["L"], scripts["A"]), check="model", learn=learn)
    assert [turn.learns for turn in episode.turns] == [letter == "L" for letter in goes_to]
    assert {letter: len(script.calls) for letter, script in scripts.items()} == {
        letter: goes_to.count(letter) for letter in "LA"
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("THE QUERY IS CORRECT", True),
        ("the query is incorrect.", False),
        ("It is not so that THE QUERY IS CORRECT... THE QUERY IS INCORRECT", False),
        ("THE QUERY IS INCORRECT? No: THE QUERY IS CORRECT", True),
        ("THE QUERY IS NOT CORRECT", False),
        ("looks good to me", None),
    ],
)
def test_the_last_verdict_counts(text: str, expected: bool | None) -> None:
    assert verdict(text) is expected


def test_without_a_verdict_the_rule_decides(serve, task: SqlTask) -> None:
    reviewer = serve("hm")
    assert outcomes(play(task, endpoint(serve(GOOD), reviewer), check="model")) == [("write", "rows"), ("check", "")]
    assert len(play(replace(task, max_turns=2), endpoint(serve(EMPTY), reviewer), check="model").turns) == 3


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, "{}"), "Error code: 500"),
        ((401, '{"error": {"message": "bad key"}}'), "bad key"),
        ((400, '{"error": {"message": "prompt of 300 tokens is over 256"}}'), "over 256"),
        ((200, "<html>"), "no chat completion"),
        ((200, '{"choices": []}'), "no chat completion"),
        ((200, '{"choices": [{"message": 3}]}'), "no chat completion"),
    ],
)
def test_no_completion_is_an_infrastructure_failure(serve, task: SqlTask, answer: tuple[int, str], says: str) -> None:
    with pytest.raises(InfrastructureError, match=says):
        play(task, endpoint(serve(answer)), check="rule")


def test_one_failing_answer_is_asked_for_again(serve, task: SqlTask) -> None:
    script = serve((503, "{}"), GOOD)
    assert play(task, endpoint(script), check="rule").answer == GOOD
    assert len(script.calls) == 2


def test_nobody_listening_is_an_infrastructure_failure(task: SqlTask) -> None:
    llm = endpoint(Script([], base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(InfrastructureError, match=r"no completion from http://127.0.0.1:9/v1"):
        play(task, llm, check="rule")


@pytest.mark.parametrize("content", [None, b"no database, only text " * 60])
def test_a_missing_or_broken_database_is_an_infrastructure_failure(serve, task: SqlTask, tmp_path: Path, content) -> None:
    path = tmp_path / "other.sqlite"
    if content:
        path.write_bytes(content)
    script = serve(GOOD)
    with pytest.raises(InfrastructureError, match=r"other\.sqlite"):
        play(replace(task, database=path), endpoint(script), check="rule")
    assert script.calls == []


def test_a_runaway_query_ends_and_is_told(serve, task: SqlTask) -> None:
    runaway = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    script = serve(runaway, GOOD)
    episode = play(replace(task, query_timeout_s=0.2), endpoint(script), check="rule")
    assert outcomes(episode) == [("write", "timeout"), ("rewrite", "rows")]


def test_a_thought_without_content_is_a_format_failure_not_an_error(serve, task: SqlTask) -> None:
    script = serve((200, completion(None)), f"<think>\n\n</think>\n\n{GOOD}")
    episode = play(task, endpoint(script), check="rule")
    assert [turn.message for turn in episode.turns] == ["the answer is empty", ""]
    assert episode.answer == GOOD


def test_no_room_for_another_attempt_leaves_the_answer_as_it_stands(serve, task: SqlTask) -> None:
    refusal = json.dumps({"error": {"message": "This model's maximum context length is 64 tokens, the messages take 99"}})
    script = serve(EMPTY, (400, refusal))
    episode = play(task, endpoint(script), check="rule")
    assert (episode.answer, outcomes(episode)) == (EMPTY, [("write", "empty")])
    with pytest.raises(PromptTooLong):
        play(task, endpoint(serve((400, refusal))), check="rule")


def test_compact_prompts_are_what_the_tiny_policy_was_warmed_on(serve, task: SqlTask) -> None:
    script = serve(WRONG, EMPTY, GOOD)
    play(task, endpoint(script), check="rule", prompt="compact")
    first = {"role": "user", "content": "customers(id, name, city)\nWho lives in Rome?"}
    assert [call["messages"] for call in script.calls] == [
        [first],
        [first, {"role": "assistant", "content": WRONG}, {"role": "user", "content": "Error: no such column: nope"}],
        [first, {"role": "assistant", "content": EMPTY}, {"role": "user", "content": "The result is empty."}],
    ]


def test_concurrent_episodes_share_one_agent_and_do_not_mix(serve, task: SqlTask) -> None:
    script = serve(WRONG)

    async def run() -> list[Episode]:
        agent = SqlAgent(SqlAgentConfig(check="rule", prompt="compact"))
        tasks = [replace(task, task_id=f"t/{n}", question=f"Question {n}?") for n in range(40)]
        episodes = await asyncio.gather(*(agent.solve(one, endpoint(script)) for one in tasks))
        await close_clients()
        return episodes

    for number, episode in enumerate(asyncio.run(run())):
        assert episode.task.task_id == f"t/{number}"
        assert len(episode.turns) == 3
        assert all(f"Question {number}?" in turn.prompt[0]["content"] for turn in episode.turns)


@pytest.mark.parametrize("limit", [768, 1024, 4096])
def test_prompts_stay_under_their_limit_by_construction(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "wide.sqlite"
    connection = sqlite3.connect(path)
    for n in range(4):
        connection.execute(f"CREATE TABLE t{n} (" + ", ".join(f"column_{n}_{m} TEXT" for m in range(5)) + ")")
        connection.execute(f"INSERT INTO t{n} VALUES (" + ", ".join(["'some long sample value'"] * 5) + ")")
    connection.commit()
    connection.close()
    prompts = Prompts(max_tokens=limit)
    context = prompts.context(SqlTask("t", "What is this? " * 5, "wide", path))
    long = "SELECT " + "very_long_name, " * 3000
    rows = Result("rows", ("column",) * 100, [("x" * 500,) * 100] * 50)
    told = prompts.tell_review(prompts.tell(rows), "It is wrong because. " * 2000)
    error = prompts.tell(Result("error", message="no such column: " + "é1" * 5000))
    for messages in (
        prompts.write(context),
        prompts.rewrite(context, long, told),
        prompts.rewrite(context, long, error),
        prompts.check(context, long, prompts.tell(rows)),
    ):
        # 6 tokens a message: <|im_start|>, role, newline, <|im_end|>, newline, and one to spare
        assert sum(estimate(message["content"]) + 6 for message in messages) + 3 <= limit


def test_cutting_keeps_the_beginning_and_says_so() -> None:
    assert cut("short", 10) == "short"
    text = cut("one two three " * 100, 20)
    assert text.startswith("one two three") and text.endswith(" ...") and estimate(text) <= 20
    assert cut("x" * 10**7, 20).startswith("xx")


def test_a_schema_whose_names_do_not_fit_is_an_infrastructure_failure(task: SqlTask) -> None:
    with pytest.raises(InfrastructureError, match="names of 1 tables alone"):
        Prompts(max_tokens=400).context(replace(task, question="word " * 50))
