"""The gateway and the warm runners, both real: who dies, hangs or fails takes only his own episode with him."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.instant_policy import app as instant_policy
from slurmlight.errors import UserError
from slurmlight.presets.schema import RunnerSection
from slurmlight.train.rollouts.children import Child, ChildEnded, free_port
from slurmlight.train.rollouts.gateway import Gateway, GatewayApi
from slurmlight.train.rollouts.play import Job, Playground, TooManyFailed, read_events
from slurmlight.train.rollouts.pool import RunnerPool
from tests.trainbed import PLAYER, REPOSITORY, make_run, serving

TIMEOUT_S = 8.0


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Ended, or a zombie nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def policy() -> Iterator[str]:
    """The URL of an instant policy."""
    with serving(instant_policy) as url:
        yield url


@pytest.fixture(scope="module")
def playground(policy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    folder = tmp_path_factory.mktemp("rollouts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)  # where the runners find this player
        run = make_run(folder, overrides=[f"runner.rollout_timeout_s={TIMEOUT_S}"])
        with Gateway(folder / "logs", "some/model", 1.0) as gateway:
            gateway.api.register_model("some/model", policy)
            with RunnerPool(gateway, run, RunnerSection(n_runners=6), folder / "logs", PLAYER) as pool:
                yield Playground(gateway, pool, max_failed_share=0.5)


def jobs(name: str, count: int, **troubles: str) -> list[Job]:
    """``count`` jobs; ``troubles`` maps "j3" to the trouble of the fourth."""
    rows = [{"question": f"{name} {index}?", "seed": index} for index in range(count)]
    for place, trouble in troubles.items():
        rows[int(place[1:])]["trouble"] = trouble
    return [Job(f"{name}-{index}", row, learns=True) for index, row in enumerate(rows)]


def test_episodes_come_back_in_order_with_the_servers_own_ids_and_without_the_untrained_call(playground: Playground) -> None:
    heard: list[int] = []
    asked = jobs("plain", 20)
    played = playground.play(asked, heard.append)
    assert [one.job for one in played] == asked
    assert heard == list(range(1, 21))
    for one in played:
        assert one.error == ""
        assert one.reward in (0.0, 1.0)
        assert len(one.calls) == 2  # of three: one went through the auxiliary channel
        assert all(len(call.prompt) == 60 and call.response == tuple(range(13)) for call in one.calls)
        assert all(call.logprobs == (-0.5,) * 13 for call in one.calls)
    eventually(lambda: playground._cleaning.done())
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        playground.gateway.api._get("/rollouts/plain-0-1")  # the server forgets what was collected


def test_an_agent_that_raises_fails_its_episode_only_and_is_never_a_reward_of_0(playground: Playground, tmp_path: Path) -> None:
    once = f"raise {tmp_path / 'raised'}"
    played = playground.play(jobs("raise", 6, j1="raise", j2=once))
    assert [one.reward is None for one in played] == [False, True, False, False, False, False]
    assert played[1].error == "error: RuntimeError: no cats here"
    assert played[1].calls == ()


@pytest.mark.stack
def test_the_verl_engine_plays_a_failed_episode_once_more_but_none_that_was_slow(
    playground: Playground, tmp_path: Path
) -> None:
    pytest.importorskip("verl", reason="verl is not installed (requirements-stack.lock)")
    from slurmlight.presets.learning import CreditSection
    from slurmlight.train.verl.engine import _EndedSince
    from slurmlight.train.verl.rollouts import Hooks, Rollouts, Rules

    gateway, told = playground.gateway, []
    rollouts = Rollouts(agl_base_url=gateway.url, agl_key=gateway.key, model="some/model", step=1)

    def unasked(*_: Any) -> Any: ...

    hooks = Hooks(
        beat=unasked,
        log=unasked,
        stop=unasked,
        alive=playground.pool.check,
        ended=_EndedSince(gateway.api),
        episode_ended=playground.pool.episode_ended,
        forget=gateway.api.forget,
        save=unasked,
    )
    rollouts.guard(Rules(0, 0.5, False, CreditSection()), hooks, told.append, [])
    troubles = ["", f"raise {tmp_path / 'raised'}", "raise", "hang"]
    data = {"question": [f"again {n}?" for n in range(4)], "seed": [*range(4)], "trouble": troubles}
    done = rollouts.enqueue_and_wait_until_completed(data, is_train=True)
    assert sorted(one.sample_idx_in_step for one in done) == [0, 1] and rollouts.failed == 2
    assert {one.rollout_id.endswith("-again") for one in done if one.sample_idx_in_step == 1} == {True}
    assert all(one.triplets and one.final_reward in (0.0, 1.0) for one in done)


def test_an_episode_whose_runner_has_lost_it_fails(playground: Playground, tmp_path: Path) -> None:
    """A claim whose answer got lost: it runs, and nobody plays it."""
    with Gateway(tmp_path, "some/model", 1.0) as gateway:
        gateway.api.enqueue([{"rollout_id": "adrift", "input": {}, "is_train": True}])
        gateway.api._post("/claims", {"name": "runner-1", "limit": 1})
        pool = RunnerPool(gateway, tmp_path, RunnerSection(n_runners=1, rollout_timeout_s=0.5), tmp_path)
        pool.check()
        assert gateway.api.ended(0)[0] == []  # it may still be playing
        pool.overdue_s = 0.0
        pool.looked = 0.0
        pool.check()
        (ended,), _ = gateway.api.ended(0)
        assert (ended.name, ended.error) == ("adrift", "lost: no answer long after the time-out")


def test_an_agent_that_hangs_fails_at_its_time_limit_and_holds_nobody_up(playground: Playground) -> None:
    played = playground.play(jobs("hang", 8, j0="hang", j5="hang"))
    assert [one.reward is None for one in played] == [True, False, False, False, False, True, False, False]
    assert played[0].error == f"timeout: no answer within {TIMEOUT_S:g} s"


def test_an_agent_that_blocks_its_runner_is_named_and_the_others_are_played_again(playground: Playground) -> None:
    first = playground.pool.runners[0].process.pid
    played = playground.play(jobs("block", 8, j3="block"))
    assert [one.reward is None for one in played] == [False, False, False, True, False, False, False, False]
    assert played[3].error.startswith("blocked: the agent blocked its runner")
    assert playground.pool.runners[0].process.pid != first


def test_a_runner_that_dies_is_replaced_and_what_it_had_is_played_again(playground: Playground, tmp_path: Path) -> None:
    played = playground.play(jobs("die", 8, j2=f"die {tmp_path / 'died'}"))
    assert all(one.reward is not None for one in played)
    assert (tmp_path / "died").exists()


def test_a_runner_killed_from_outside_costs_no_episode(playground: Playground) -> None:
    def kill_once(ended: int) -> None:
        if ended == 5:
            os.kill(playground.pool.runners[0].process.pid, signal.SIGKILL)

    played = playground.play(jobs("kill", 24), kill_once)
    assert all(one.reward is not None for one in played)


def test_too_many_failures_end_the_batch_with_the_first_ones_words(playground: Playground) -> None:
    with pytest.raises(TooManyFailed, match=r"3 of 4 episodes failed .* no cats here"):
        playground.play(jobs("much", 4, j0="raise", j1="raise", j3="raise"))


def test_runners_that_cannot_start_end_the_pool_with_their_last_words(
    policy: str, playground: Playground, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    pool = RunnerPool(playground.gateway, run, RunnerSection(n_runners=1), tmp_path, "nowhere:make")
    with pool, pytest.raises(ChildEnded, match=r"runners died without ending an episode.*no player called 'nowhere:make'"):
        eventually(lambda: bool(pool.check()), seconds=300)


def test_the_key_is_in_no_command_line_and_no_log_and_needed(playground: Playground) -> None:
    gateway = playground.gateway
    assert httpx.get(f"{gateway.url}/api/rollouts/terminal").status_code == 401
    processes = [gateway.child, *playground.pool.runners]
    for child in processes:
        assert gateway.key not in Path(f"/proc/{child.process.pid}/cmdline").read_text()
        assert gateway.key not in child.log.read_text()


def test_a_port_that_is_taken_is_said_plainly(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is taken"), Gateway(tmp_path, "some/model", 1.0, port=port):
            pass


def test_a_gateway_that_is_killed_is_noticed(policy: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with Gateway(tmp_path, "some/model", 1.0) as gateway, RunnerPool(gateway, run, RunnerSection(), tmp_path, PLAYER) as pool:
        os.kill(gateway.child.process.pid, signal.SIGKILL)
        with pytest.raises(ChildEnded, match="gateway was killed by SIGKILL"):
            Playground(gateway, pool, 0.5).play(jobs("late", 1))


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from slurmlight.train.rollouts.children import Child\n"
        f"child = Child('sleeper', ['sleep', '600'], Path({str(tmp_path)!r}) / 'log')\n"
        "print(child.process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    eventually(lambda: "sleep" in Path(f"/proc/{child}/cmdline").read_text())
    parent.kill()
    parent.wait()
    eventually(lambda: gone(child))


def test_how_a_child_ended_is_told_with_its_own_last_words_only(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("words of another attempt\n")
    child = Child("worker", [sys.executable, "-c", "import sys; sys.exit('out of cheese')"], log)
    child.process.wait(60)
    assert child.ending() == "worker ended with exit code 1; its last words: out of cheese"
    silent = Child("worker", ["true"], log)
    silent.process.wait(60)
    assert silent.ending() == "worker ended with exit code 0"


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], "without a reward"),
        ([{"event_type": "reward", "data": {"value": 1.0}}], "no token ids"),
        ([("ok", [1], [2], None), {"event_type": "reward", "data": {"value": 1.0}}], "no token ids"),
        ([("ok", [1], [], []), {"event_type": "reward", "data": {"value": 1.0}}], "no token ids"),
        ([("error", [1], [2], [-1.0]), {"event_type": "reward", "data": {"value": 1.0}}], "no token ids"),
    ],
)
def test_an_episode_without_what_training_needs_has_failed(events: list[Any], says: str) -> None:
    whole = [request(*event) if isinstance(event, tuple) else event for event in events]
    played = read_events(Job("x", {}, learns=True), whole)
    assert played.reward is None
    assert says in played.error


def test_the_last_reward_counts() -> None:
    events = [request("ok", [1], [2], [-1.0]), *({"event_type": "reward", "data": {"value": value}} for value in (0.0, 1.0))]
    assert read_events(Job("x", {}, learns=True), events).reward == 1.0


def request(status: str, prompt: list[int], response: list[int], logprobs: list[float] | None) -> dict[str, Any]:
    data = {"prompt_token_ids": prompt, "response_token_ids": response, "response_log_probs": logprobs, "status": status}
    return {"event_type": "model_request", "data": data}


def test_an_api_call_to_a_server_that_is_gone_raises(tmp_path: Path) -> None:
    api = GatewayApi(f"http://127.0.0.1:{free_port()}", "key")
    with pytest.raises(httpx.HTTPError):
        api.ended(0)


def test_a_reward_that_is_no_number_is_no_reward() -> None:
    for value in (float("nan"), float("inf")):
        played = read_events(Job("x", {}, learns=True), [{"event_type": "reward", "data": {"value": value}}])
        assert played.reward is None and "no number to learn from" in played.error


def test_a_composed_reward_brings_its_parts() -> None:
    parts = {"reward": 0.4, "rewards": {"execution_match": 0.0, "syntax": 1.0}, "plain": 0.0, "calls": []}
    events = [{"event_type": "reward", "data": {"value": 0.0}}, {"event_type": "parts", "data": parts}]
    played = read_events(Job("x", {}, learns=False), events)
    assert (played.reward, played.parts) == (0.0, parts), "in validation the reward is plain execution match"
