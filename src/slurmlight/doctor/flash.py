"""flash-attn's extension against torch: the wheel's C++ ABI by its symbols, without importing either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slurmlight.doctor import Finding, elf

PREFIXES = ("_ZN3c105Error", "_ZN3c106detail")  # c10::Error and c10::detail take std::string: their names tell the ABI
OLD_STRING = "Ss"  # std::string of the ABI before GCC 5; the new one is spelled ...__cxx1112basic_string...


def files(folders: list[Path]) -> tuple[list[Path], Path | None]:
    """(flash-attn's extension modules, torch's libc10.so) below the site-packages ``folders``."""
    found = [path for folder in folders for path in sorted(folder.glob("flash_attn_*_cuda*.so"))]
    c10 = (folder / "torch/lib/libc10.so" for folder in folders)
    return found, next((path for path in c10 if path.is_file()), None)


def check(modules: list[Path], c10: Path | None, needed: bool) -> Iterator[Finding]:
    """``needed``: this stack cannot train on a GPU without flash-attn (verl 0.5.0 imports it)."""
    if c10 is None:
        return
    if not modules:
        if needed:
            yield Finding(
                "flash-attn",
                "warning",
                "flash-attn is not installed",
                "verl 0.5.0 imports flash_attn.bert_padding on every GPU",
                "install the wheel named in docker/seed/README.md",
            )
        return
    offered = elf.symbols(c10, PREFIXES)[1]
    for module in modules:
        lacking = sorted(elf.symbols(module, PREFIXES)[0] - offered)
        if not lacking:
            yield Finding("flash-attn", "ok", f"{module.name} finds torch's symbols")
            continue
        old = any(name.endswith(OLD_STRING) or f"{OLD_STRING}E" in name for name in lacking)
        kinds = (
            ("old C++ ABI (cxx11abiFALSE)", "new one", "TRUE") if old else ("new C++ ABI (cxx11abiTRUE)", "old one", "FALSE")
        )
        yield Finding(
            "flash-attn",
            "error",
            f"{module.name}: undefined symbol {lacking[0]}",
            f"the wheel has the {kinds[0]}, torch the {kinds[1]}",
            f"install the cxx11abi{kinds[2]} wheel for this torch (docker/seed/README.md)",
        )
