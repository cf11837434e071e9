"""Python and package versions against the lock, and the pairs of packages that are known to break each other."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmlight.doctor import Finding

PYTHON = (3, 12)  # both stacks: verl 0.9.1 wants < 3.13, Agent-Lightning 1.0.2 wants >= 3.12
CORE = ("torch", "vllm", "verl", "agentlightning", "ray", "transformers")
SHOWN = 8

Versions = Mapping[str, str]


def installed() -> dict[str, str]:
    """Every installed distribution by normalised name."""
    return {normal(one.metadata["Name"]): one.version for one in importlib.metadata.distributions() if one.metadata["Name"]}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_path(stack: str) -> Path | None:
    """The lock this Python was made from (in the image), else the checkout's."""
    places = (Path(sys.prefix, "requirements.lock"), Path(__file__).parents[3] / "docker" / stack / "requirements.lock")
    return next((place for place in places if place.is_file()), None)


def read_lock(text: str) -> dict[str, str]:
    """name -> version of a requirements file with pins; other lines (hashes, comments, URLs) are passed over."""
    pins = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", text, re.MULTILINE)
    return {normal(name): version for name, version in pins}


def own_pins() -> dict[str, str]:
    """The kit's own pins (pyproject.toml), which are all the tiny preset needs."""
    try:
        wanted = importlib.metadata.requires("slurmlight") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return read_lock("\n".join(line for line in wanted if "dev" not in line))


def check_python(version: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) == PYTHON:
        return Finding("python", "ok", f"Python {text}")
    return Finding(
        "python", "error", f"Python {text}, the stacks are for 3.12", "wheels and pickles differ by minor version", "make setup"
    )


def check_lock(have: Versions, locked: Versions, stack: str) -> Iterator[Finding]:
    """What is missing and what differs from the lock; one finding each, the core packages first."""
    ranked = sorted(locked, key=lambda name: (name not in CORE, name))
    missing = [name for name in ranked if name not in have]
    if "torch" in missing:
        yield Finding(
            "lock",
            "error",
            f"stack {stack} is not installed in this Python ({sys.executable})",
            "nothing of it can be imported",
            "run this inside the image (docs/images.md)" if stack != "tiny" else "make setup",
        )
        return
    other = [
        f"{name} {have[name]} (lock: {locked[name]})" for name in ranked if name in have and _differs(have[name], locked[name])
    ]
    if missing:
        yield Finding("lock", "error", f"missing: {_few(missing)}", "imports fail at some later step", _install(stack))
    if other:
        yield Finding("lock", "warning", f"differs from the lock: {_few(other)}", "this set was never tested", _install(stack))
    if not missing and not other:
        yield Finding("lock", "ok", f"{len(locked)} packages are as locked for {stack}")


def _install(stack: str) -> str:
    return "make setup" if stack == "tiny" else f"uv pip sync --require-hashes docker/{stack}/requirements.lock"


def _differs(have: str, locked: str) -> bool:
    return have.split("+")[0] != locked.split("+")[0]  # a local label (+cu128, +cpu) is the same release


def _few(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@dataclass(frozen=True)
class Pit:
    """Two packages that break each other where both tests hold: what the log will say, and what mends it."""

    first: str
    first_bad: Callable[[tuple[int, ...]], bool]
    second: str
    second_bad: Callable[[tuple[int, ...]], bool]
    symptom: str
    mend: str


PITS = (
    Pit(
        "transformers",
        lambda version: version >= (5,),
        "vllm",
        lambda version: version < (0, 12),
        "the engine dies at start: no attribute all_special_tokens_extended",
        "uv pip install 'transformers>=4.55.2,<5'",
    ),
    Pit(
        "fastapi",
        lambda version: version >= (0, 137),
        "prometheus-fastapi-instrumentator",
        lambda version: version < (8,),
        "every request to vLLM's server fails: '_IncludedRouter' object has no attribute 'path'",
        "uv pip install fastapi==0.128.0 prometheus-fastapi-instrumentator==7.1.0",
    ),
    Pit(
        "datasets",
        lambda version: version < (3, 6),
        "pyarrow",
        lambda version: version >= (21,),
        "import of agentlightning.verl fails: module 'pyarrow' has no attribute 'PyExtensionType'",
        "uv pip install 'datasets>=3.6'",
    ),
    Pit(
        "numpy",
        lambda version: version >= (2,),
        "verl",
        lambda version: version < (0, 9),
        "this verl is written for numpy 1",
        "uv pip install numpy==1.26.4",
    ),
    Pit(
        "xgrammar",
        lambda version: version >= (0, 2, 9),
        "apache-tvm-ffi",
        lambda version: version < (0, 1, 11),
        "load_lib_module() got an unexpected keyword argument 'extra_lib_paths'",
        "uv pip install xgrammar==0.2.3",
    ),
)


def check_pairs(have: Versions) -> Iterator[Finding]:
    clean = True
    for pit in PITS:
        if pit.first not in have or pit.second not in have:
            continue
        if pit.first_bad(number(have[pit.first])) and pit.second_bad(number(have[pit.second])):
            clean = False
            pair = f"{pit.first} {have[pit.first]} with {pit.second} {have[pit.second]}"
            yield Finding("pairs", "error", pair, pit.symptom, pit.mend)
    if clean:
        yield Finding("pairs", "ok", "no pair of packages that is known to break")


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*", version).group().split(".") if part)  # type: ignore[union-attr]
