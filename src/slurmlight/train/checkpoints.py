"""Which checkpoints of a run folder are complete, and which one a resume takes. Reads the disk; standard library only.

The layout is verl's (fsdp_checkpoint_manager, ray_trainer of 0.5 to 0.9): ``global_step_N/actor/`` holds the files
``{model,optim,extra_state}_world_size_W_rank_R.pt`` for R = 0 .. W-1, ``global_step_N/data.pt`` the state of the data
loader, written last; ``latest_checkpointed_iteration.txt`` beside them names the newest step. verl believes that tracker
and starts from step 0 where it is wrong; here the disk decides and the tracker is repaired. Writing is in saving.py.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlight.errors import UserError
from slurmlight.files import write_atomic
from slurmlight.train.whole import missing, unreadable

TRACKER = "latest_checkpointed_iteration.txt"
PARTS = ("model", "optim", "extra_state")
ACCEPTED = "accepted_without_data"  # a person's word that this step may be resumed although data.pt is missing

_STEP = re.compile(r"^global_step_(0|[1-9]\d*)$")
_LEFTOVER = re.compile(rf"^\.(?:global_step_\d+\.(?:tmp|trash|old)|{re.escape(TRACKER)}\.\d+\.tmp)$")
_SHARD = re.compile(r"^(?:model|optim|extra_state)_world_size_([1-9]\d*)_rank_\d+\.pt$")


@dataclass(frozen=True)
class Checkpoint:
    """One ``global_step_N`` folder. ``flaw`` says why it is not complete ("" when it is), ``size`` is in bytes.

    ``world_size`` is the number of GPUs (processes) that wrote it; 0 where no shard tells.
    """

    step: int
    path: Path
    world_size: int
    size: int
    flaw: str = ""

    @property
    def complete(self) -> bool:
        return not self.flaw


@dataclass(frozen=True)
class Resume:
    """Where to go on: ``step`` 0 and no ``path`` for a fresh start. ``notes`` are for the log, one line each."""

    step: int
    path: Path | None
    notes: tuple[str, ...] = ()


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}"


def shard_name(part: str, world_size: int, rank: int) -> str:
    """The file of ``part`` (one of PARTS) that ``rank`` writes, below ``actor/``."""
    return f"{part}_world_size_{world_size}_rank_{rank}.pt"


def scan(folder: Path, world_size: int = 0) -> list[Checkpoint]:
    """Every step on disk in numeric order, complete or not. ``world_size`` is preferred where a step has shards of several.

    Changes nothing. Raises OSError where ``folder`` itself cannot be read; an absent folder has no steps.
    """
    return [inspect(step, step_folder(folder, step), world_size) for step in _steps(folder)]


def newest_complete(folder: Path) -> Checkpoint | None:
    """The newest complete step, by whatever number of GPUs."""
    looked = (inspect(step, step_folder(folder, step)) for step in reversed(_steps(folder)))
    return next((one for one in looked if one.complete), None)


def inspect(step: int, path: Path, world_size: int = 0) -> Checkpoint:
    """Look at one step folder."""
    try:
        worlds = {int(match[1]) for name in os.listdir(path / "actor") if (match := _SHARD.match(name))}
    except OSError as error:
        return Checkpoint(step, path, 0, _size(path), f"actor/ cannot be read ({error.strerror})")
    if not worlds:
        return Checkpoint(step, path, 0, _size(path), "actor/ has no shard")
    flaws = {world: _flaw(path, world) for world in sorted(worlds, key=lambda world: (world != world_size, -world))}
    chosen = next((world for world, flaw in flaws.items() if not flaw), next(iter(flaws)))
    return Checkpoint(step, path, chosen, _size(path), flaws[chosen])


def choose(checkpoints: Sequence[Checkpoint], world_size: int, tracker: str | None) -> Resume:
    """The newest complete step, whatever ``tracker`` (that file's text; None: no file) says.

    Raises UserError where going on would lose work: steps exist but none is complete, the newest complete one was
    written by another number of GPUs, or a tracker is there and its checkpoints are not.
    """
    complete = [one for one in checkpoints if one.complete]
    if not complete:
        if checkpoints:
            raise UserError(*_none_complete(checkpoints))
        if tracker is not None:
            raise UserError(
                f"{TRACKER} {_wording(tracker, _tracked(tracker))} but no checkpoint is here",
                "put the checkpoints back, or start over with 'launch --fresh' (moves this run aside)",
            )
        return Resume(0, None)
    newest = complete[-1]
    if newest.world_size != world_size:
        raise UserError(
            f"step {newest.step} was saved by {newest.world_size} GPUs and this job has {world_size} "
            f"({newest.world_size} -> {world_size}): its shards cannot be loaded",
            f"launch with {newest.world_size} GPUs in all, or start over with 'launch --fresh' (moves this run aside)",
        )
    notes = [f"step {one.step} is not complete: {one.flaw}" for one in checkpoints if one.step > newest.step]
    if notes:
        notes.append(f"falling back to step {newest.step}, the newest complete one")
    if (said := _tracked(tracker)) != newest.step:
        notes.append(f"{TRACKER} {_wording(tracker, said)}: a resume sets it to {newest.step}, the newest complete step")
    return Resume(newest.step, newest.path, tuple(notes))


def resume_point(folder: Path, world_size: int) -> Resume:
    """``choose`` for ``folder`` after ``clean_up``, then repair the tracker. For the trainer, before it starts.

    Raises UserError as ``choose`` does, OSError where the tracker cannot be written.
    """
    clean_up(folder)
    found = choose(scan(folder, world_size), world_size, read_tracker(folder))
    if found.path is not None and _tracked(read_tracker(folder)) != found.step:
        write_tracker(folder, found.step)
    return found


def clean_up(folder: Path) -> list[str]:
    """Remove what a killed attempt left half written or half deleted; the names. Only the trainer may call it."""
    names = sorted(name for name in (os.listdir(folder) if folder.is_dir() else []) if _LEFTOVER.match(name))
    for name in names:
        found, target = folder / name, folder / name[1:].rpartition(".")[0]
        if name.endswith(".old") and not target.exists():  # killed while a step was replaced: take the old one back
            os.rename(found, target)
        elif found.is_dir():
            shutil.rmtree(found, ignore_errors=True)
        else:
            found.unlink(missing_ok=True)
    return names


def read_tracker(folder: Path) -> str | None:
    try:
        return (folder / TRACKER).read_text(errors="replace")
    except FileNotFoundError:
        return None


def write_tracker(folder: Path, step: int) -> None:
    write_atomic(folder / TRACKER, str(step))


def accept(folder: Path, step: int) -> None:
    """A person accepts a step whose only flaw is a missing data.pt: data then start anew. Raises UserError otherwise."""
    found = next((one for one in scan(folder) if one.step == step), None)
    if found is None:
        raise UserError(f"there is no step {step} in {folder}", "slurmlight checkpoints RUN lists what is there")
    if found.complete:
        return
    if found.flaw != missing("data.pt"):
        raise UserError(f"step {step} cannot be resumed: {found.flaw}", "only a missing data.pt can be accepted")
    write_atomic(found.path / ACCEPTED, "")


def _steps(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _STEP.match(name)))


def _none_complete(checkpoints: Sequence[Checkpoint]) -> tuple[str, str]:
    flaws = ", ".join(f"step {one.step}: {one.flaw}" for one in checkpoints)
    mend = "repair it, or start over with 'launch --fresh' (moves this run aside)"
    if last := next((one for one in reversed(checkpoints) if one.flaw == missing("data.pt")), None):
        mend += f", or resume without the data state with 'slurmlight checkpoints RUN --accept {last.step}'"
    return f"checkpoints exist but none is complete ({flaws})", mend


def _tracked(tracker: str | None) -> int | None:
    text = (tracker or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _wording(tracker: str | None, said: int | None) -> str:
    if tracker is None:
        return "is missing"
    return f"says {said}" if said is not None else f"holds no step ({tracker[:40]!r})"


def _flaw(path: Path, world_size: int) -> str:
    for part in PARTS:
        for rank in range(world_size):
            name = f"actor/{shard_name(part, world_size, rank)}"
            if flaw := unreadable(path / name, name):
                return flaw
    if (flaw := unreadable(path / "data.pt", "data.pt")) and not (flaw == missing("data.pt") and (path / ACCEPTED).exists()):
        return flaw
    weights = sorted(str(found.relative_to(path)) for found in path.rglob("*.safetensors"))
    return next((flaw for name in weights if (flaw := unreadable(path / name, name))), "")


def _size(path: Path) -> int:
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # it was deleted while we looked
    return total
