"""Writing and deleting checkpoints so that a kill at any instant leaves every step whole or invisible.

A step is written as ``.global_step_N.tmp``, flushed, verified, renamed, and only then named by the tracker. A step is
deleted by a rename to ``.global_step_N.trash`` first. ``checkpoints.clean_up`` removes what a killed attempt left of either.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slurmlight.files import sync_folder
from slurmlight.train.checkpoints import Checkpoint, inspect, newest_complete, scan, step_folder, write_tracker


class NoSpace(OSError):
    """The disk (or the quota) has no room for a checkpoint. Older checkpoints are untouched; an attempt may try again."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.ENOSPC, what)

    def __str__(self) -> str:
        return str(self.args[1])


@dataclass(frozen=True)
class Retention:
    """Which steps stay: the ``newest`` k (None: all), the ``best`` by validation, every ``every``-th step (0: none)."""

    newest: int | None = None
    best: bool = False
    every: int = 0


@contextmanager
def saving(folder: Path, step: int, world_size: int = 1) -> Iterator[Path]:
    """Yields the folder to write ``actor/`` (made already) and ``data.pt`` into; on leaving it becomes ``global_step_N``.

    Raises NoSpace where the disk is or gets full, OSError where what was written is not a complete checkpoint, and
    whatever the body raises; the partial folder is then gone, older checkpoints and the tracker are as they were.
    """
    temporary = folder / f".global_step_{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    need_space(folder, step)
    try:
        (temporary / "actor").mkdir(parents=True)
        yield temporary
        _sync_tree(temporary)
        written = inspect(step, temporary, world_size)
        if written.flaw or written.world_size != world_size:
            raise OSError(f"checkpoint {step} was written but is not whole: {written.flaw or 'wrong number of shards'}")
        _publish(temporary, step_folder(folder, step))
        write_tracker(folder, step)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if _is_full(error) and not isinstance(error, NoSpace):
            raise NoSpace(_no_room(folder, step, "the disk filled up while it was written")) from error
        raise


def need_space(folder: Path, step: int) -> None:
    """Raises NoSpace where the disk has less room than the newest complete checkpoint took, plus 5 %."""
    newest = newest_complete(folder)
    if newest is None:
        return  # the first save tells how large one is
    need, free = int(newest.size * 1.05), shutil.disk_usage(folder).free
    if free < need:
        raise NoSpace(_no_room(folder, step, f"{need / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free"))


def to_delete(checkpoints: Sequence[Checkpoint], rule: Retention, scores: Mapping[int, float]) -> list[Checkpoint]:
    """What ``rule`` lets go, oldest first. ``scores`` are validation scores by step, larger is better.

    Nothing newer than the newest complete step is ever let go, and never that one; torn steps older than it are.
    """
    complete = [one.step for one in checkpoints if one.complete]
    if not complete:
        return []
    kept = set(complete if rule.newest is None else complete[-max(rule.newest, 1) :])
    known = [step for step in complete if step in scores and scores[step] == scores[step]]  # NaN is no score
    if rule.best and known:
        kept.add(max(known, key=lambda step: (scores[step], step)))
    if rule.every:
        kept |= {step for step in complete if step % rule.every == 0}
    return [one for one in checkpoints if one.step not in kept and one.step < complete[-1]]


def prune(folder: Path, rule: Retention, scores: Mapping[int, float]) -> list[int]:
    """Delete what ``to_delete`` finds in a scan of the disk; the steps that went. For the trainer, after a save."""
    gone = to_delete(scan(folder), rule, scores)
    for one in gone:
        trash = folder / f".global_step_{one.step}.trash"
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(one.path, trash)
        sync_folder(folder)
        shutil.rmtree(trash, ignore_errors=True)
    return [one.step for one in gone]


def _publish(temporary: Path, final: Path) -> None:
    old = final.with_name(f".{final.name}.old")
    if final.exists():  # the torn remains of an earlier attempt, or the same step saved once more
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(temporary, final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            handle = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_folder(Path(parent))


def _is_full(error: BaseException) -> bool:
    """torch.save tells of a full disk by a RuntimeError of its zip writer (inline_container.cc), others by an OSError."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("inline_container", "PytorchStreamWriter"))


def _no_room(folder: Path, step: int, why: str) -> str:
    newest = newest_complete(folder)
    safe = f"step {newest.step} is untouched" if newest else "nothing was saved before"
    return (
        f"no room for checkpoint {step} in {folder} ({why}); {safe}: "
        "free some space or quota, or lower trainer.max_actor_ckpt_to_keep, and the run goes on from there"
    )
