"""The seed stack's rollouts end to end but for the model: which calls train, what a failed episode says, who may die (mark ``seed``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from tests import seedbed
from tests.shared import REPOSITORY

pytestmark = pytest.mark.seed
pytest.importorskip("agentlightning.verl.daemon", reason="the seed stack is not installed (make test-seed)")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each scenario of seedchain printed."""
    run = seedbed.make_run(tmp_path_factory.mktemp("chain"), overrides=["runner.rollout_timeout_s=12"])
    command = [sys.executable, "-m", "tests.seedchain", str(run)]
    env = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "AGENTOPS_LOGGING_TO_FILE": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(command, cwd=run, env=env, capture_output=True, text=True, timeout=400)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"scenario"')]
    assert done.returncode == 0, done.stderr[-3000:]
    left = [one for one in psutil.process_iter(["cmdline"]) if str(run) in (one.info["cmdline"] or [])]
    assert not left, "processes were left behind"
    return {line["scenario"]: line for line in lines}


def test_only_calls_of_learning_nodes_become_rows(told: dict[str, dict[str, Any]]) -> None:
    """write and rewrite, two rows a rollout; "was it right?" (13 characters) is check's and does not train."""
    rows = told["rows_of"]["rows"]
    assert len(rows) == 8 and len({rollout for rollout, _, _ in rows}) == 4
    lengths = sorted({ids[1] for _, ids, _ in rows})
    assert lengths == [22, 28]  # the question, and the question with "again"
    assert all(ids == [1, ids[1], 3, ids[1], 7] for _, ids, _ in rows)
    assert len({(rollout, score) for rollout, _, score in rows}) == 4  # every row has its rollout's reward
    metrics = told["rows_of"]["metrics"]
    assert (metrics["training/n_turns"], metrics["training/n_groups"], metrics["training/n_sample_trained"]) == (8, 2, 8)
    assert metrics["training/n_failed_rollouts"] == 0


def test_the_model_server_gets_the_agents_request(told: dict[str, dict[str, Any]]) -> None:
    sent = told["rows_of"]["sent"]
    assert sent["max_tokens"] == 8 and sent["temperature"] == 1.0 and sent["return_token_ids"] is True
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}


def test_validation_is_greedy_and_scored(told: dict[str, dict[str, Any]]) -> None:
    assert told["validation"]["temperatures"] == [0.0, 0.0, 0.0]
    assert told["validation"]["metrics"]["val/n_rollouts"] == 1
    assert told["validation"]["metrics"]["val/reward"] in (0.0, 1.0)


def test_too_many_failures_end_the_attempt_with_the_first_reason(told: dict[str, dict[str, Any]]) -> None:
    assert told["raising"]["error"] == "TooManyFailed: 2 of 2 episodes failed, the first: RuntimeError: no cats here"


def test_an_episode_that_does_not_end_is_ended(told: dict[str, dict[str, Any]]) -> None:
    hanging, blocking = told["endless"]["failures"][:2], told["endless"]["failures"][2:]
    assert hanging == ["TimeoutError: no answer within 12 s"] * 2
    assert len(blocking) == 2
    assert all(one.startswith("lost: Worker-") and one.endswith("was killed by SIGALRM") for one in blocking)


def test_a_killed_runner_costs_its_episode_and_is_replaced(told: dict[str, dict[str, Any]]) -> None:
    found = told["runner_killed"]
    (failure,) = found["failures"]
    assert failure.startswith("lost: Worker-") and failure.endswith("was killed by SIGKILL")
    assert found["failed_next"] == 0 and found["runners"] == 2


def test_runners_that_die_of_every_episode_end_the_attempt(told: dict[str, dict[str, Any]]) -> None:
    assert "2 of 2 episodes failed, the first: lost: Worker-" in told["dying"]["error"]
    assert told["dying"]["error"].endswith("was killed by SIGKILL")


def test_a_killed_proxy_is_named(told: dict[str, dict[str, Any]]) -> None:
    assert told["proxy_killed"]["error"].startswith("ChildEnded: the LLM proxy was killed by SIGKILL")
    assert told["proxy_killed"]["seconds"] < 60
