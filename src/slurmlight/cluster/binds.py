"""What a container sees of the host: the folders of a run under their host paths, and the places to bind them on."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from slurmlight.cluster import ports
from slurmlight.cluster.runtimes import Bind
from slurmlight.errors import UserError
from slurmlight.plan import JobPlan


def of_plan(plan: JobPlan, extra: Iterable[str] = ()) -> tuple[Bind, ...]:
    """Project and run folder, what links in the project's own folders lead to, the plan's binds and ``extra``; outer first.

    Everything is seen under its host path, so that paths in configurations mean the same on both sides. The node's scratch
    folder is shared too: Ray and the payload meet in sockets there, each in a container of its own.
    """
    project = Path(plan.project_folder)
    own = [project, Path(plan.run_folder), *(project / name for name in ("data", "models", "checkpoints"))]
    own.append(ports.root(plan.scratch))
    paths = [str(way) for path in own if path.exists() for way in (path, path.resolve())] + list(extra)
    asked = [parse(text) for text in plan.binds]
    taken = {bind.target for bind in asked}
    wanted = [*asked, *(parse(path) for path in dict.fromkeys(paths) if path not in taken)]
    kept: list[Bind] = []
    for bind in sorted(wanted, key=lambda one: len(Path(one.target).parts)):
        covered = any(
            not outer.read_only and outer.source == outer.target and Path(bind.target).is_relative_to(outer.target)
            for outer in kept
        )
        if not (covered and bind.source == bind.target and not bind.read_only):
            kept.append(bind)
    return tuple(kept)


def parse(text: str) -> Bind:
    source, *rest = text.split(":")
    mode = rest.pop() if rest and rest[-1] in ("ro", "rw") else "rw"
    target = rest.pop() if rest else source
    source = os.path.expanduser(source)
    target = source if target.startswith("~") else target
    if rest or not source.startswith("/") or not target.startswith("/") or re.search(r"[,\s]", text):
        raise UserError(f"bind '{text}' is not SOURCE[:TARGET][:ro] with absolute paths", "no blanks, commas or further colons")
    return Bind(source, target, mode == "ro")


def check(bound: Iterable[Bind], run_folder: str) -> None:
    """Raises UserError for a source that is not on this node, and for a run folder that would be read-only inside."""
    for bind in bound:
        if not Path(bind.source).exists():
            raise UserError(f"bind {bind.source} does not exist on {platform.node()}", "correct 'binds' of the profile")
        if bind.read_only and Path(run_folder).is_relative_to(bind.target):
            raise UserError(f"bind {bind.spelled()} makes the run folder read-only", "drop ':ro', or bind the run folder apart")


def make_mount_points(image_folder: Path, bound: Iterable[Bind]) -> None:
    """ch-run binds only onto what is there, and mounts the image read-only. /tmp is the host's inside it."""
    for bind in bound:
        place = image_folder / bind.target.lstrip("/")
        if place.exists() or Path(bind.target).is_relative_to("/tmp"):
            continue
        try:
            if Path(bind.source).is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        except OSError as error:
            raise UserError(
                f"image folder {image_folder} has no {bind.target} to bind on ({error.strerror})", f"mkdir -p {place}"
            ) from None
