"""GLIBC and GLIBCXX: planted extensions that ask for versions nobody has, and an old libstdc++ first on the path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurmlight.doctor import elf, flash, libraries
from slurmlight.doctor.libraries import Loaded

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="plants are compiled: needs a C compiler")


def build(folder: Path, name: str, source: str, *flags: str) -> Path:
    file = folder / f"{name}.c"
    file.write_text(source)
    out = folder / name
    subprocess.run(["cc", "-shared", "-fPIC", "-nostartfiles", "-o", out, file, *flags], check=True, timeout=120)
    return out


def stub(folder: Path, soname: str, *versions: str) -> Path:
    """A shared library called ``soname`` that defines ``versions``, one function in each."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "versions.map"
    script.write_text("\n".join(f"{version} {{ global: f{n}; }};" for n, version in enumerate(versions)))
    source = "\n".join(f"int f{n}(void) {{ return {n}; }}" for n in range(len(versions)))
    return build(folder, soname, source, f"-Wl,--version-script={script}", f"-Wl,-soname,{soname}", "-nostdlib")


@pytest.fixture
def extension(tmp_path: Path) -> Path:
    """site/flash_attn_2_cuda.so asks libstdc++.so.6 for GLIBCXX_3.4.99."""
    newer = stub(tmp_path / "newer", "libstdc++.so.6", "GLIBCXX_3.4.21", "GLIBCXX_3.4.99")
    (tmp_path / "site").mkdir()
    return build(
        tmp_path / "site",
        "planted.so",
        "int f0(void); int f1(void); int g(void) { return f0() + f1(); }",
        "-nostdlib",
        str(newer),
    )


def test_too_new_glibcxx_is_found(extension: Path) -> None:
    asked = libraries.needs([extension.parent])
    assert asked[extension]["libstdc++.so.6"] == {"GLIBCXX_3.4.21", "GLIBCXX_3.4.99"}
    finding, *rest = libraries.check(asked, libraries.loaded())
    assert not rest and finding.severity == "error"
    assert "planted.so asks for GLIBCXX_3.4.99" in finding.what and "ends at GLIBCXX_3.4." in finding.what
    assert "libstdc++ older than the wheel" in finding.why


def test_too_new_glibc_is_another_cause(tmp_path: Path) -> None:
    newer = stub(tmp_path / "newer", "libc.so.6", "GLIBC_2.99")
    build(tmp_path, "planted.so", "int f0(void); int g(void) { return f0(); }", "-nostdlib", str(newer))
    (tmp_path / "newer/libc.so.6").unlink()
    finding = next(libraries.check(libraries.needs([tmp_path]), libraries.loaded()))
    assert "GLIBC_2.99" in finding.what and "glibc older than the wheel" in finding.why


def test_old_libstdcxx_first_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """conda's classic: the distribution's own library would do, another one is loaded."""
    old = stub(tmp_path / "conda/lib", "libstdc++.so.6", "GLIBCXX_3.4.20")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(old.parent))
    have = libraries.loaded()
    assert have["libstdc++.so.6"].path == old
    asked = {Path("ext.so"): {"libstdc++.so.6": frozenset({"GLIBCXX_3.4.21"})}}
    finding = next(libraries.check(asked, have))
    assert str(old) in finding.what and "ends at GLIBCXX_3.4.20" in finding.what
    assert "conda deactivate" in finding.mend and str(old.parent) in finding.mend


def test_versions_are_compared_as_numbers() -> None:
    have = {"libstdc++.so.6": Loaded(Path("/l"), frozenset({"GLIBCXX_3.4.9", "GLIBCXX_3.4.30"}))}
    asked = {Path("a.so"): {"libstdc++.so.6": frozenset({"GLIBCXX_3.4.32", "GLIBCXX_3.4.9"})}}
    finding = next(libraries.check(asked, have))
    assert "asks for GLIBCXX_3.4.32" in finding.what and "ends at GLIBCXX_3.4.30" in finding.what


def test_this_python_is_well() -> None:
    """The interpreter's own extension modules load, so nothing may be found."""
    folder = Path(next(path for path in sys.path if path.endswith("lib-dynload")))
    asked = libraries.needs([folder])
    assert len(asked) > 20
    assert [finding.severity for finding in libraries.check(asked, libraries.loaded())] == ["ok"]


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs binutils")
def test_the_reader_agrees_with_readelf() -> None:
    path = libraries.loaded()["libstdc++.so.6"].path
    text = subprocess.run(["readelf", "-V", "-W", path], capture_output=True, text=True, check=True, timeout=60).stdout
    definitions, _, needs = text.partition("Version needs section")
    facts = elf.read(path)
    assert facts is not None
    assert facts.defines == set(re.findall(r"Name: (\S+)", definitions))
    assert {version for versions in facts.needs.values() for version in versions} == set(
        re.findall(r"Name: (\S+)  Flags", needs)
    )


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(60), b"\x7fELF\x02\x01" + bytes(20)])
def test_what_is_no_elf_file_is_passed_over(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(content)
    assert elf.read(path) is None


def test_a_cut_off_file_is_passed_over(extension: Path) -> None:
    whole = extension.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 40)):
        extension.write_bytes(whole[:size])
        elf.read(extension)


# flash-attn

NEW = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
OLD = "_ZN3c105ErrorC2ENS_14SourceLocationESs"


def plant_flash(folder: Path, torch: str, wheel: str) -> list[Path]:
    (folder / "torch/lib").mkdir(parents=True)
    build(folder / "torch/lib", "libc10.so", f"int {torch}(void) {{ return 1; }}", "-nostdlib")
    build(folder, "flash_attn_2_cuda.so", f"int {wheel}(void); int g(void) {{ return {wheel}(); }}", "-nostdlib")
    return [folder]


@pytest.mark.parametrize(("torch", "wheel", "named"), [(NEW, OLD, "cxx11abiTRUE wheel"), (OLD, NEW, "cxx11abiFALSE wheel")])
def test_flash_attn_of_the_wrong_abi(tmp_path: Path, torch: str, wheel: str, named: str) -> None:
    modules, c10 = flash.files(plant_flash(tmp_path, torch, wheel))
    (finding,) = flash.check(modules, c10, needed=True)
    assert finding.severity == "error" and f"undefined symbol {wheel}" in finding.what and named in finding.mend


def test_flash_attn_that_fits_and_one_that_is_missing(tmp_path: Path) -> None:
    modules, c10 = flash.files(plant_flash(tmp_path, NEW, NEW))
    assert [finding.severity for finding in flash.check(modules, c10, needed=True)] == ["ok"]
    assert [finding.severity for finding in flash.check([], c10, needed=True)] == ["warning"]
    assert list(flash.check([], c10, needed=False)) == []


def test_a_process_really_fails_as_foretold(extension: Path) -> None:
    """What check() says is what the loader does."""
    done = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(extension)!r})"],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert done.returncode and "GLIBCXX_3.4.99" in done.stderr
