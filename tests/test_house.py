"""The arrows between the rooms, and the light host half: read from the source, so that no refactoring moves them unseen."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared import REPOSITORY

SOURCE = REPOSITORY / "src" / "slurmlight"
HEAVY = {
    "torch",
    "numpy",
    "ray",
    "vllm",
    "verl",
    "agentlightning",
    "transformers",
    "pyarrow",
    "langgraph",
    "openai",
    "pydantic",
}
FORBIDDEN = {
    "cluster": ("train", "agents", "rewards", "sql", "data", "evaluate", "cli"),
    "train": ("cluster", "cli"),
    "agents": ("train", "cluster", "rewards", "cli"),
    "rewards": ("train", "cluster", "cli"),
    "sql": ("train", "cluster", "agents", "rewards", "cli"),
    "data": ("train", "cluster", "rewards", "cli"),
    "evaluate": ("cluster", "cli"),
}


def modules(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py"))


def imports(path: Path, top_level_only: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_no_room_it_must_not_know(room: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in modules(room)
        for name in imports(path, top_level_only=False)
        for other in FORBIDDEN[room]
        if name == f"slurmlight.{other}" or name.startswith(f"slurmlight.{other}.")
    ]
    assert not found


def test_nothing_but_the_front_door_imports_the_command_line() -> None:
    found = [
        path
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "cli" and any(name.startswith("slurmlight.cli") for name in imports(path, False))
    ]
    assert not found


@pytest.mark.parametrize(
    "command",
    [["--help"], ["launch", "--preset", "qwen", "--partition", "a800", "--dry-run"], ["status"], ["doctor", "--help"]],
)
def test_the_host_half_loads_nothing_heavy(command: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nsys.argv = ['slurmlight', *sys.argv[1:]]\nfrom slurmlight.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_modules_stay_small() -> None:
    assert not [
        f"{path.relative_to(SOURCE)}: {lines}"
        for path in SOURCE.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 330
    ]
    assert len((REPOSITORY / "launch.py").read_text().splitlines()) < 100
