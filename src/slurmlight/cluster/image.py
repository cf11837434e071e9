"""What an image is: its form (file, folder, reference), whether this node can run it, and which build it is."""

from __future__ import annotations

import hashlib
import os
import platform
import struct
from pathlib import Path
from typing import Any

from slurmlight.cluster import command
from slurmlight.errors import UserError
from slurmlight.files import read_json, write_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder

INSPECT_DEADLINE_S = 30.0
SIF_MAGIC = b"SIF_MAGIC\0"  # at byte 32 of the file; the architecture's two digits stand at byte 45 (SIF header, version 01)
SIF_MACHINES = {"01": "i686", "02": "x86_64", "03": "armv7l", "04": "aarch64", "05": "ppc64", "06": "ppc64le", "11": "s390x"}
ELF_MACHINES = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}  # e_machine
OCI_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
SQUASHFS_MAGIC = b"hsqs"
SAMPLES, SAMPLE_BYTES = 256, 65536


def path_of(image: str, project: str) -> Path | None:
    """The file or folder that ``image`` names, relative ones below the project folder; None for a registry reference."""
    path = Path(project, os.path.expanduser(image))
    looks_like_path = image.startswith(("/", "./", "../", "~")) or path.suffix in (".sif", ".sqsh", ".sqfs", ".squashfs")
    return path if looks_like_path or path.exists() else None


def form_of(image: str, path: Path | None) -> str:
    """sif, squashfs, folder or reference (keys of runtimes.FORMS). Raises UserError where the image is missing, unreadable
    or none of them: on the node, since that is where the container starts."""
    if path is None:
        return "reference"
    node = platform.node()
    try:
        if path.is_dir():
            os.listdir(path)
            return "folder"
        head = _head(path, 64)
    except FileNotFoundError:
        raise UserError(f"image {path} does not exist on {node}", "correct 'image', or copy it to a shared folder") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"image {path} cannot be read on {node} ({reason})", f"chmod a+rX {path}") from None
    if head[32:42] == SIF_MAGIC:
        return "sif"
    if head[:4] == SQUASHFS_MAGIC:
        return "squashfs"
    raise UserError(f"image {path} is neither SIF nor squashfs", "make it with 'slurmlight image convert'")


def check_machine(image: str, form: str, path: Path | None, runtime: str) -> None:
    """Raises UserError where the image is for another processor than this node's, or a reference was never pulled here."""
    if path is None:
        machine = _inspect(image, runtime)[0] if runtime in ("podman", "docker") else None
    else:
        machine = _sif_machine(path) if form == "sif" else _folder_machine(path) if form == "folder" else None
    if machine and machine != platform.machine():
        raise UserError(
            f"image {image} is built for {machine}, node {platform.node()} is {platform.machine()}",
            "build the image on such a node, or choose another partition",
        )


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _sif_machine(path: Path) -> str | None:
    return SIF_MACHINES.get(_head(path, 48)[45:47].decode("ascii", "replace"))


def _folder_machine(folder: Path) -> str | None:
    """By the first ELF program found. Symlinks are left out: an absolute one would lead out of the image, to the host's."""
    for name in ("usr/bin/env", "usr/bin/dash", "usr/bin/bash", "bin/busybox", "bin/env", "bin/bash"):
        program = folder / name
        if program.is_file() and not program.is_symlink():
            head = _head(program, 20)
            if head[:4] == b"\x7fELF":
                return ELF_MACHINES.get(struct.unpack_from("<H" if head[5] == 1 else ">H", head, 18)[0], "another processor")
    return None


def _inspect(image: str, runtime: str) -> tuple[str, str]:
    """(machine, digest) of a local image, as podman or docker tell."""
    ask = (runtime, "image", "inspect", "--format", "{{.Architecture}} {{.Id}}", image)
    done = command.run(*ask, deadline_s=INSPECT_DEADLINE_S, check=False)
    if done.code:
        if "daemon" in done.words.lower():
            raise UserError(f"{runtime} on {platform.node()}: {done.words}", "start its daemon, or set another runtime")
        raise UserError(f"image {image} is not on node {platform.node()} ({done.words})", f"{runtime} pull {image}")
    architecture, _, digest = done.stdout.strip().partition(" ")
    return OCI_MACHINES.get(architecture, architecture), digest


def identity(image: str, path: Path | None, runtime: str) -> str:
    """What tells two builds of the same name apart; empty where nothing does (a reference that pyxis pulls by itself).

    Files are sampled, evenly spread: reading 10 GB at every start would cost a minute, and squashfs differs everywhere
    after the first changed file.
    """
    if path is None:
        return _inspect(image, runtime)[1] if runtime in ("podman", "docker") else ""
    if path.is_dir():
        marks = [path / "opt/slurmlight/image.json", path / "ch/environment"]
        found = [mark.read_bytes() for mark in marks if mark.is_file()]
        return "marks-sha256:" + hashlib.sha256(b"\0".join(found)).hexdigest() if found else ""
    digest, size = hashlib.sha256(), path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(size * number // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return "sampled-sha256:" + digest.hexdigest()


def record(plan: JobPlan, runtime: str) -> str:
    """Write which image this attempt runs in to the run's image.json. Returns a warning where it is not the last one's."""
    place = RunFolder(plan.run_folder).path / "image.json"
    path = path_of(plan.image, plan.project_folder) if plan.image else None
    here: dict[str, Any] = {"image": plan.image, "runtime": runtime, "identity": ""}
    if plan.image:
        here["identity"] = identity(plan.image, path, runtime)
    before = read_json(place)
    if before == here:
        return ""
    write_json(place, here)
    if not isinstance(before, dict):
        return ""
    old, new = (f"{one.get('image') or 'no image'} {str(one.get('identity'))[:24]}".strip() for one in (before, here))
    return f"this attempt runs in another image than the last: {old} before, {new} now" if old != new else ""


def environment(path: Path | None) -> tuple[tuple[str, str], ...]:
    """The ENV of an image folder, from ch/environment where a converter left it."""
    try:
        lines = (path / "ch/environment").read_text().splitlines() if path else []
    except OSError:
        return ()
    pairs = [line.partition("=") for line in lines if "=" in line]
    return tuple((key, value.removeprefix("'").removesuffix("'")) for key, _, value in pairs)
