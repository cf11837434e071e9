"""GLIBC and GLIBCXX: what every extension module asks for against what this process loads (conda's libstdc++ is a classic)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmlight.doctor import Finding, elf

PROBE_DEADLINE_S = 30.0
LIBRARIES = {"libstdc++.so.6": ("GLIBCXX", "CXXABI"), "libc.so.6": ("GLIBC",), "libm.so.6": ("GLIBC",)}
SYSTEM_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/lib64")
# Asks the loader itself, so that LD_LIBRARY_PATH, LD_PRELOAD, the interpreter's RPATH and the cache all count.
_PROBE = (
    "import ctypes, json, sys\n"
    "for name in sys.argv[1:]:\n    ctypes.CDLL(name)\n"
    "print(json.dumps(sorted({line.split()[-1] for line in open('/proc/self/maps') if '.so' in line})))"
)


@dataclass(frozen=True)
class Loaded:
    """A library as a process gets it, and the versions it defines; ``system`` is the distribution's own, if another."""

    path: Path
    defines: frozenset[str]
    system: Path | None = None
    system_defines: frozenset[str] = frozenset()


def loaded(python: str = sys.executable) -> dict[str, Loaded]:
    """LIBRARIES as ``python`` loads them in this environment, by soname; a missing one is left out."""
    import json

    found: dict[str, Loaded] = {}
    for name in LIBRARIES:
        done = subprocess.run(
            [python, "-c", _PROBE, name], capture_output=True, text=True, timeout=PROBE_DEADLINE_S, stdin=subprocess.DEVNULL
        )
        stem = name.split(".so")[0] + "."
        paths = [Path(path) for path in json.loads(done.stdout or "[]") if Path(path).name.startswith((stem, stem[:-1] + "-"))]
        if done.returncode == 0 and paths and (own := elf.read(paths[0])):
            found[name] = _with_system(name, paths[0], own)
    return found


def _with_system(name: str, path: Path, own: elf.Elf) -> Loaded:
    others = (Path(folder, name) for folder in SYSTEM_FOLDERS)
    other = next((one for one in others if one.exists() and not one.samefile(path)), None)
    found = elf.read(other) if other else None
    return Loaded(path, own.defines, other, found.defines if found else frozenset())


def needs(folders: Iterable[Path]) -> dict[Path, Mapping[str, frozenset[str]]]:
    """What each extension module and bundled library below ``folders`` asks of LIBRARIES."""
    found: dict[Path, Mapping[str, frozenset[str]]] = {}
    for folder in folders:
        for path in folder.rglob("*.so*"):
            facts = elf.read(path) if path.is_file() and not path.is_symlink() else None
            if facts:
                found[path] = {library: versions for library, versions in facts.needs.items() if library in LIBRARIES}
    return found


def check(asked: Mapping[Path, Mapping[str, frozenset[str]]], have: Mapping[str, Loaded]) -> Iterator[Finding]:
    """A finding for each library that is too old for some module, naming the newest version asked for."""
    clean = True
    for library, kinds in LIBRARIES.items():
        if library not in have:
            continue
        for kind in kinds:
            lacking = {
                path: [one for one in versions.get(library, ()) if _is(one, kind) and one not in have[library].defines]
                for path, versions in asked.items()
            }
            lacking = {path: versions for path, versions in lacking.items() if versions}
            if lacking:
                clean = False
                yield _too_old(library, kind, lacking, have[library])
    if clean:
        yield Finding("libraries", "ok", f"{len(asked)} extension modules find the GLIBC and GLIBCXX versions they ask for")


def _too_old(library: str, kind: str, lacking: Mapping[Path, list[str]], have: Loaded) -> Finding:
    newest = max((one for versions in lacking.values() for one in versions), key=_number)
    worst = next(path for path, versions in lacking.items() if newest in versions)
    ends = max((one for one in have.defines if _is(one, kind)), key=_number, default="nothing")
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    what = f"{worst.name}{more} asks for {newest}; the process loads {have.path}, which ends at {ends}"
    name = "libstdc++" if kind != "GLIBC" else "glibc"
    if have.system and all(one in have.system_defines for versions in lacking.values() for one in versions):
        mend = f"{have.system} is new enough: conda deactivate, or take {have.path.parent} out of LD_LIBRARY_PATH"
    elif kind == "GLIBC":
        mend = "run inside the image (docker/), or install a wheel built for this glibc"
    else:
        mend = "run inside the image (docker/), or conda install -c conda-forge 'libstdcxx-ng>=13'"
    return Finding("libraries", "error", what, f"importing it fails: {name} older than the wheel", mend)


def _is(version: str, kind: str) -> bool:
    return version.startswith(f"{kind}_") and version[len(kind) + 1 :][:1].isdigit()


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
