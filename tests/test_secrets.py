"""What is secret and stays in the environment: cases X-01 to X-06, and redaction of arbitrary secrets in arbitrary text."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmlight import presets
from slurmlight.cluster.submit import script
from slurmlight.errors import UserError
from slurmlight.plan import make_plan
from slurmlight.secrets import forwarded_names, is_secret_name, redact
from slurmlight.tracking.swanlab_mode import choose_mode
from tests.shared import REPOSITORY

AWKWARD = "a\"b$c'd\nline2"


def test_x01_values_of_the_usual_keys_are_masked_and_names_stay() -> None:
    environment = {"SWANLAB_API_KEY": "q7Zk3LmP0aXw", "HF_TOKEN": "hf_abcdefgh", "WANDB_API_KEY": "0123456789abcdef"}
    text = "\n".join(f"export {name}={value}; run --key {value}" for name, value in environment.items())
    shown = redact(text, environment)
    assert not [value for value in environment.values() if value in shown]
    assert all(name in shown for name in environment)
    assert set(forwarded_names(environment)) == set(environment)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http_proxy=http://user1:pass@proxy:3128", "http_proxy=http://***@proxy:3128"),
        ("postgres://u:p@ss@host/db", "postgres://***@host/db"),
        ("https://token@github.com/a.git", "https://***@github.com/a.git"),
        ("ssh://git@github.com/a.git", "ssh://git@github.com/a.git"),
        ("docker://image:tag@sha256:0123", "docker://image:tag@sha256:0123"),
        ("http://host:80/path?mail=a@b.c", "http://host:80/path?mail=a@b.c"),
    ],
)
def test_x02_users_in_urls_are_masked(text: str, shown: str) -> None:
    assert redact(text, {}) == shown


def test_x02_a_proxy_password_is_masked_outside_its_url_too() -> None:
    environment = {"http_proxy": "http://user1:pass@proxy:3128"}
    assert redact("connecting as user1:pass: passed", environment) == "connecting as ***: passed"


@pytest.mark.parametrize("override", ["env.HF_TOKEN=hf_abcdefgh", "verl.trainer.wandb_api_key=hf_abcdefgh"])
def test_x03_a_secret_on_the_command_line_is_refused_without_its_value(override: str) -> None:
    with pytest.raises(UserError, match="export it instead") as raised:
        presets.load("tiny", [override])
    assert "hf_abcdefgh" not in str(raised.value)


def test_x03_launch_never_echoes_a_token_given_in_the_wrong_place() -> None:
    command = [sys.executable, str(REPOSITORY / "launch.py"), "--preset", "tiny", "--dry-run"]
    token = "hf_ABCDEFGHIJKLMNOPQRST"
    done = subprocess.run([*command, "--set", f"trainer.save_freq={token}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "trainer.save_freq" in done.stderr
    assert token not in done.stdout + done.stderr


def test_x04_names_that_merely_contain_token_are_harmless() -> None:
    environment = {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "4096", "PWD": "/home/me", "SSH_AUTH_SOCK": "/tmp/agent"}
    text = "\n".join(f"{name}={value}" for name, value in environment.items()) + "\nfalse 4096 /home/me"
    assert redact(text, environment) == text
    for name in ("EOS_TOKEN", "TOKEN_FILE", "AWS_ACCESS_KEY_ID", "KEYBOARD", "MONKEY", "max_tokens"):
        assert not is_secret_name(name), name
    for name in ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "MY_SECRET_THING", "api_key", "GITHUB_TOKEN"):
        assert is_secret_name(name), name


def test_no_key_of_a_preset_has_a_secret_name() -> None:
    from slurmlight.presets.describe import keys

    assert not [key.name for key in keys() if is_secret_name(key.name.rpartition(".")[2])]


def test_x05_no_line_of_an_awkward_value_reaches_script_or_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", AWKWARD)
    plan = make_plan(
        presets.load("qwen"),
        name="x05",
        project=tmp_path,
        cluster="slurm",
        python=sys.executable,
        partition="a800",
        env_names=forwarded_names(),
    )
    rendered = script(plan)
    assert subprocess.run(["bash", "-n"], input=rendered, text=True).returncode == 0
    spelled = [AWKWARD, json.dumps(AWKWARD), repr(AWKWARD), shlex.quote(AWKWARD), f"export WANDB_API_KEY={AWKWARD}"]
    for text in (rendered, *(redact(f"log: {text} end") for text in spelled)):
        assert not [line for line in AWKWARD.splitlines() if line in text], text


def test_x06_the_cloud_without_its_key_is_refused_before_submission(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SWANLAB_API_KEY"):
        choose_mode(["console", "swanlab"], {"SWANLAB_MODE": "cloud"})
    command = [sys.executable, str(REPOSITORY / "launch.py"), "--preset", "qwen", "--partition", "a800", "--dry-run"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "SWANLAB_MODE": "cloud"},
    )
    assert done.returncode == 2 and "SWANLAB_API_KEY" in done.stderr and done.stderr.count("\n") == 1


def test_a_job_script_that_names_a_secret_is_left_alone() -> None:
    line = '[ -z "${HF_TOKEN+x}" ] || export APPTAINERENV_HF_TOKEN="$HF_TOKEN"'
    assert redact(line, {}) == line
    assert redact("write it as key=value, token: 5", {}) == "write it as key=value, token: 5"


@pytest.mark.parametrize("text", ['"HF_TOKEN": "abcd1234"', "api_key='abcd1234'", "Authorization: Bearer abcd1234"])
def test_values_assigned_to_secret_names_are_masked_in_foreign_text(text: str) -> None:
    assert "abcd1234" not in redact(text, {}) and "***" in redact(text, {})


def test_users_name_what_else_a_job_needs() -> None:
    environment = {"MY_DB": "x", "MY_OTHER": "y", "HOME": "/", "SLURMLIGHT_FORWARD": "MY_*, HOME"}
    assert forwarded_names(environment) == ("HOME", "MY_DB", "MY_OTHER", "SLURMLIGHT_FORWARD")


@settings(max_examples=200, deadline=None)
@given(
    secret=st.text(st.characters(codec="ascii", exclude_characters="\x00", exclude_categories=["Cc"]), min_size=8, max_size=40),
    before=st.text(max_size=20),
    after=st.text(max_size=20),
)
def test_a_secret_is_masked_in_any_text(secret: str, before: str, after: str) -> None:
    secret = secret.strip()
    if len(secret) < 8 or secret.isdigit():
        return
    shown = redact(f"{before} {secret} {after} {json.dumps(secret)}", {"MY_API_KEY": secret})
    assert secret not in shown or secret in f"{before} *** {after} ***"
