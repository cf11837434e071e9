"""A reader for the few parts of an ELF file that decide whether it loads: symbol versions, dynamic symbols, needed libraries.

Layouts: System V ABI (header, section and dynamic tables) and the Linux Standard Base, "Symbol Versioning" (Verneed,
Verdef). Only 64-bit files of this machine's byte order are read; others give None.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHT_DYNAMIC, SHT_DYNSYM, SHT_VERDEF, SHT_VERNEED = 6, 11, 0x6FFFFFFD, 0x6FFFFFFE
DT_NEEDED, DT_SONAME, DT_RPATH, DT_RUNPATH = 1, 14, 15, 29
SHN_UNDEF = 0
_ORDER = {"little": (1, "<"), "big": (2, ">")}[sys.byteorder]


@dataclass(frozen=True)
class Elf:
    """``needs`` maps a library to the versions asked of it; ``defines`` are the versions this file itself offers."""

    machine: int
    needs: dict[str, frozenset[str]]
    defines: frozenset[str]
    libraries: tuple[str, ...] = ()
    rpath: str = ""
    runpath: str = ""


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    count: int


class _File:
    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data, self.order = data, _ORDER[1]
        self.machine = self.unpack("H", 18)[0]
        (start,), (entry_size, number) = self.unpack("Q", 0x28), self.unpack("HH", 0x3A)
        self.sections = [self._section(start + index * entry_size) for index in range(number)]

    def unpack(self, kinds: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(self.order + kinds, self.data, offset)

    def _section(self, at: int) -> _Section:
        _, kind, _, _, offset, size, link, info, _, _ = self.unpack("IIQQQQIIQQ", at)
        return _Section(kind, offset, size, link, info)

    def of(self, kind: int) -> _Section | None:
        return next((section for section in self.sections if section.kind == kind), None)

    def text(self, section: _Section, offset: int) -> str:
        start = self.sections[section.link].offset + offset
        return self.data[start : self.data.find(b"\0", start)].decode("ascii", "replace")


def read(path: Path) -> Elf | None:
    """The dynamic facts of ``path``; None where it is no such ELF file (a script, another byte order, cut off)."""
    with _opened(path) as file:
        if file is None:
            return None
        try:
            return _facts(file)
        except (struct.error, IndexError):
            return None


def symbols(path: Path, prefixes: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """(undefined, defined) dynamic symbols of ``path`` that start with one of ``prefixes``; empty where it is not readable."""
    with _opened(path) as file:
        table = file.of(SHT_DYNSYM) if file else None
        if file is None or table is None:
            return frozenset(), frozenset()
        undefined, defined = set[str](), set[str]()
        for at in range(table.offset, table.offset + table.size, 24):
            name, _, _, index = file.unpack("IBBH", at)
            text = file.text(table, name)
            if text.startswith(prefixes):
                (undefined if index == SHN_UNDEF else defined).add(text)
        return frozenset(undefined), frozenset(defined)


class _opened:
    """The mapped file, or None where it is not a 64-bit ELF file of this byte order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> _File | None:
        self.handle = open(self.path, "rb")
        head = self.handle.read(6)
        if head[:5] != b"\x7fELF\x02" or head[5] != _ORDER[0]:
            return None
        try:
            return _File(mmap.mmap(self.handle.fileno(), 0, access=mmap.ACCESS_READ))
        except (struct.error, ValueError):
            return None

    def __exit__(self, *_: object) -> None:
        self.handle.close()


def _facts(file: _File) -> Elf:
    needs = {library: frozenset(versions) for library, versions in _needs(file)}
    tags: dict[int, list[str]] = {}
    if dynamic := file.of(SHT_DYNAMIC):
        for at in range(dynamic.offset, dynamic.offset + dynamic.size, 16):
            tag, value = file.unpack("QQ", at)
            if tag in (DT_NEEDED, DT_RPATH, DT_RUNPATH):
                tags.setdefault(tag, []).append(file.text(dynamic, value))
            elif tag == 0:
                break
    return Elf(
        machine=file.machine,
        needs=needs,
        defines=frozenset(_defines(file)),
        libraries=tuple(tags.get(DT_NEEDED, ())),
        rpath=":".join(tags.get(DT_RPATH, ())),
        runpath=":".join(tags.get(DT_RUNPATH, ())),
    )


def _needs(file: _File) -> Iterator[tuple[str, list[str]]]:
    section = file.of(SHT_VERNEED)
    at = section.offset if section else 0
    for _ in range(section.count if section else 0):
        assert section
        _, count, library, first, following = file.unpack("HHIII", at)
        versions, entry = [], at + first
        for _ in range(count):
            _, _, _, name, step = file.unpack("IHHII", entry)
            versions.append(file.text(section, name))
            entry += step
        yield file.text(section, library), versions
        at += following


def _defines(file: _File) -> Iterator[str]:
    section = file.of(SHT_VERDEF)
    at = section.offset if section else 0
    for _ in range(section.count if section else 0):
        assert section
        _, _, _, _, _, first, following = file.unpack("HHHHIII", at)
        yield file.text(section, file.unpack("II", at + first)[0])
        at += following
