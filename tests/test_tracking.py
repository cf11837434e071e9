"""Tracking: console, metrics.jsonl, SwanLab for real in offline mode, and what people see at the end of a run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from slurmlight.errors import UserError
from slurmlight.files import write_json
from slurmlight.runfolder import RunFolder
from slurmlight.tracking.console import StepProgress, clock
from slurmlight.tracking.curve import curve_text
from slurmlight.tracking.names import ABOUT, REWARD, SECONDS, VALIDATION, number, series
from slurmlight.tracking.summary import Example, Score, end_view, pick_examples, read_report, write_report
from slurmlight.tracking.swanlab_mode import choose_mode, run_id
from slurmlight.tracking.tracker import Tracker

BOTH = ("console", "swanlab")
PATIENCE_S = 60


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """An empty run whose SwanLab settings owe nothing to the machine."""
    for name in [name for name in os.environ if name.startswith("SWANLAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "spider")
    folder.path.mkdir()
    trainer = {"project_name": "Qwen3-1.7B-AgenticRL", "experiment_name": "spider"}
    write_json(folder.config, {"trainer": trainer, "verl": {"store": "http://me:hunter2pass@host/x"}})
    return folder


def row(step: int, reward: float = 0.5, **more: float) -> dict[str, float]:
    return {"step": step, REWARD: reward, SECONDS: 2.0, "actor/pg_loss": -0.01} | more


def offline_files(folder: RunFolder) -> list[Path]:
    return sorted((folder.path / "swanlab").glob("run-*/run-*.swanlab"))


# ---- names and console


def test_a_series_leaves_out_what_is_no_number() -> None:
    rows = [{"step": 0, VALIDATION: 0.5}, {"step": 1, VALIDATION: float("nan")}, {"step": 2}, {"step": 3, VALIDATION: 1}]
    assert series(rows, VALIDATION) == {0: 0.5, 3: 1.0}
    assert number({"x": True}, "x") is None and number({"x": "5"}, "x") is None
    assert {REWARD, VALIDATION, SECONDS} < ABOUT.keys()


def test_a_log_gets_one_plain_line_a_step() -> None:
    shown = io.StringIO()
    with StepProgress(40, done=10, console=Console(file=shown, width=40)) as progress:
        for step in (11, 12):
            progress.show(row(step, 0.25))
        progress.show(row(13, 0.25) | {VALIDATION: 0.625})
        progress.say("[bold]saved[/bold]")
    lines = shown.getvalue().splitlines()
    assert lines[1].split() == ["step", "12/40", "reward", "0.250", "2.00", "s/step", "ETA", "0:00:56", "loss", "-0.01"]
    assert "val" not in lines[1] and "val 0.625" in lines[2]
    assert lines[3:] == ["[bold]saved[/bold]"]
    assert progress.seconds_per_step == 2.0 and progress.eta == 54.0


def test_a_terminal_gets_a_bar_that_keeps_the_last_validation() -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=100, force_terminal=True, color_system=None)
    with StepProgress(4, console=console) as progress:
        progress.show({"step": 0, VALIDATION: 0.4})
        assert progress.seconds_per_step is None
        for step in (1, 2):
            progress.show(row(step))
        progress.say("checkpoint 2 saved")
    text = shown.getvalue()
    assert "checkpoint 2 saved" in text
    assert "step 2/4" in text and "reward 0.500  val 0.400  2.00 s/step  ETA 0:00:04" in text


def test_a_clock_reads_like_one() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3_725, 90_000)] == ["0:00:00", "0:01:00", "1:02:05", "1d 1:00:00"]


# ---- modes


@pytest.mark.parametrize(
    ("logger", "environment", "mode"),
    [
        (BOTH, {}, "offline"),
        (BOTH, {"SWANLAB_API_KEY": "k" * 20}, "cloud"),
        (BOTH, {"SWANLAB_API_KEY": "k" * 20, "SWANLAB_MODE": "offline"}, "offline"),
        (BOTH, {"SWANLAB_API_KEY": "k" * 20, "SWANLAB_MODE": "online"}, "cloud"),
        (BOTH, {"SWANLAB_MODE": "disabled"}, "disabled"),
        (("console",), {"SWANLAB_MODE": "cloud"}, "disabled"),
        (BOTH, {"SWANLAB_RUN_ID": "abcdefghijklmnopqrst9"}, "offline"),
    ],
)
def test_the_mode_follows_key_and_wish(logger: tuple[str, ...], environment: dict[str, str], mode: str) -> None:
    assert choose_mode(logger, environment) == mode


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean offline"):
        choose_mode(BOTH, {"SWANLAB_MODE": "ofline"})


# ---- SwanLab for real


def test_offline_swanlab_gets_every_row_and_asks_no_network(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = run.path / "network"
    hooks = run.path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(
        "import sys\n"
        f"open({str(hooks / 'watched')!r}, 'w')\n"
        "def hook(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo', 'socket.gethostbyname'):\n"
        f"        open({str(calls)!r}, 'a').write(f'{{event}} {{arguments}}\\n')\n"
        "sys.addaudithook(hook)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(hooks))
    monkeypatch.setenv("MY_API_KEY", "hunter2secret")
    write_json(
        run.config, {"trainer": {"project_name": "p", "experiment_name": "e"}, "x": "hunter2secret", "url": "http://a:b@c"}
    )
    with Tracker(run, BOTH, total=3) as tracker:
        for step in (1, 2, 3):
            tracker.log(row(step))
    assert [one["step"] for one in run.metric_rows()] == [1, 2, 3]
    (file,) = offline_files(run)
    made = run_id(run.path, {})
    assert file.name == f"run-{made}.swanlab" and REWARD.encode() in file.read_bytes()
    assert (hooks / "watched").exists() and not calls.exists(), calls.read_text()
    for path in (run.path / "swanlab").rglob("*"):
        assert not path.is_file() or not [word for word in (b"hunter2", b"a:b@") if word in path.read_bytes()], path
    with Tracker(run, BOTH, total=4, done=3) as tracker:  # the next attempt: same id, and again the whole run in one file
        tracker.log(row(4))
    (again,) = offline_files(run)
    assert again.name == file.name and len(run.metric_rows()) == 4


PAYLOAD = """
import sys, time
from slurmlight.runfolder import RunFolder
from slurmlight.tracking.tracker import Tracker
with Tracker(RunFolder(sys.argv[1]), ("swanlab",), 9) as tracker:
    tracker.log({"step": 1, "training/reward": 0.5})
    print(tracker._relay._process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_payload_leaves_no_relay_behind(run: RunFolder, signum: signal.Signals) -> None:
    payload = subprocess.Popen([sys.executable, "-c", PAYLOAD, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert payload.stdout
    relay = next(int(line) for line in payload.stdout if line.strip().isdigit())
    wait_for(lambda: bool(offline_files(run)))
    payload.send_signal(signum)
    payload.wait(PATIENCE_S)
    wait_for(lambda: not alive(relay))
    (file,) = offline_files(run)
    assert REWARD.encode() in file.read_bytes(), "what was measured before the kill is there"


def test_a_broken_swanlab_costs_one_warning(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = run.path / "broken"
    broken.mkdir()
    (broken / "swanlab.py").write_text("raise ImportError('libfoo.so: cannot open\\nsecond line')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    with Tracker(run, BOTH, total=400) as tracker:
        relay = tracker._relay
        assert relay is not None
        step = 0
        while tracker._relay is not None and step < 400:
            step += 1
            tracker.log(row(step))
            time.sleep(0.1)
        tracker.log(row(step + 1))
    shown = capsys.readouterr().out
    assert shown.count("warning: SwanLab is off (ImportError: libfoo.so: cannot open)") == 1
    assert len(run.metric_rows()) == step + 1


class _Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(401)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing_cloud() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_cloud_that_refuses_the_key_falls_back_to_offline_files(
    run: RunFolder, refusing_cloud: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "s3cretswanlabkey12345"
    monkeypatch.setenv("SWANLAB_API_KEY", key)
    monkeypatch.setenv("SWANLAB_API_HOST", refusing_cloud)
    with Tracker(run, BOTH, total=1) as tracker:
        tracker.log(row(1))
        wait_for(lambda: bool(offline_files(run)))
    shown = capsys.readouterr().out
    assert "SwanLab: cloud mode" in shown and shown.count("writing offline files instead") == 1
    assert REWARD.encode() in offline_files(run)[0].read_bytes()
    for path in run.path.rglob("*"):
        assert not path.is_file() or key.encode() not in path.read_bytes(), path


def test_a_row_without_a_step_is_a_mistake_of_the_engine(run: RunFolder) -> None:
    with Tracker(run, ("console",), total=1) as tracker, pytest.raises(ValueError, match="step"):
        tracker.log({REWARD: 1.0})


def wait_for(condition) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- the end of a run

ROWS = [
    {"step": 0, VALIDATION: 0.5},
    *(row(step, 0.5 + step / 100) for step in range(1, 31)),
    row(31, 0.9) | {VALIDATION: 0.875},
]
SCORES = [
    Score("test", "clean", 90, 120),
    Score("test", "start", 60, 120),
    Score("test", "after", 100, 120),
    Score("unseen", "start", 3, 60),
    Score("unseen", "after", 9, 60),
]


def example(before: bool, after: bool, db_id: str = "zoo", answer: str = "SELECT 1") -> Example:
    return Example(f"{before} {after} {db_id}?", db_id, "SELECT 2", answer, answer, before, after)


def rendered(view, width: int = 100) -> str:  # type: ignore[no-untyped-def]
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_curve_rises_from_left_to_right() -> None:
    lines = curve_text(ROWS, width=60, height=10).splitlines()
    assert len(lines) == 13 and max(map(len, lines)) <= 60
    plot = [line[8:] for line in lines[:10]]
    assert plot[-1].startswith("x"), "validation 0.5 at step 0 is the lowest point"
    assert "x" in plot[0] and plot[0].rstrip().endswith("x"), "0.875 at the end is at the top"
    heights = [next((y for y, line in enumerate(plot) if len(line) > x and line[x] not in " x"), None) for x in (5, 25, 45)]
    assert None not in heights and heights == sorted(heights, reverse=True), "dots of the reward climb"
    assert lines[0].startswith("  0.90 |") and lines[9].startswith("  0.50 |") and lines[11].endswith("step 31")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), max_size=30),
    st.integers(0, 120),
    st.integers(0, 30),
)
def test_a_curve_fits_its_box_whatever_the_rewards(rewards: list[float], width: int, height: int) -> None:
    text = curve_text([{"step": step, REWARD: value} for step, value in enumerate(rewards, 1)], width, height)
    assert not text or (len(text.splitlines()) == height + 3 and len(rewards) > 1)


def test_the_report_is_written_and_read_back(run: RunFolder) -> None:
    for one in ROWS:
        run.add_metrics(one)
    examples = [example(False, True)]
    folder = write_report(run, SCORES, examples)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["run"], summary["step"], summary["validation_first"], summary["validation_best"]) == (
        "spider",
        31,
        0.5,
        0.875,
    )
    assert (summary["validation_best_step"], summary["reward_first"], summary["seconds_per_step"]) == (31, 0.51, 2.0)
    assert read_report(run) == (SCORES, examples)
    assert sorted(path.name for path in folder.iterdir()) == ["curve.png", "examples.json", "summary.json"]
    write_json(folder / "summary.json", {"scores": [{"of": "another version"}]})
    assert read_report(run) == ([], [])


def test_the_report_of_a_run_without_a_step_is_empty_not_an_error(run: RunFolder) -> None:
    folder = write_report(run)
    assert json.loads((folder / "summary.json").read_text())["step"] == 0 and (folder / "curve.png").exists()
    assert read_report(run) == ([], [])


def test_the_end_shows_curve_table_and_examples() -> None:
    text = rendered(end_view(ROWS, SCORES, [example(False, True), example(False, False)]))
    assert "test (120)" in text and "0.750" in text and "0.500" in text and "0.833" in text
    assert "before it was weakened" in text
    unseen = next(line for line in text.splitlines() if line.startswith("unseen (60)"))
    assert unseen.split()[2:] == ["0.050", "0.150"]
    assert text.count("wrong") == 3 and text.count("wanted") == 1 and "step 31" in text


def test_model_text_cannot_steer_the_terminal() -> None:
    hostile = "SELECT '\x1b]0;owned\x07\x1b[2J[red]x[/red]'\n\r" + "y" * 5000
    text = rendered(end_view([], [], [example(False, False, answer=hostile)]), width=300)
    assert not [char for char in text if ord(char) < 32 and char != "\n"] and "[red]x[/red]" in text
    assert len(text) < 2500


def test_examples_show_what_was_learned_from_several_databases() -> None:
    learned = [example(False, True, db) for db in ("zoo", "zoo", "bank")]
    others = [example(True, True), example(False, False), example(True, False)]
    assert pick_examples([*others, *learned]) == [learned[0], learned[2], learned[1]]
    assert pick_examples(others) == [others[1], others[0], others[2]]
    assert pick_examples([]) == []
