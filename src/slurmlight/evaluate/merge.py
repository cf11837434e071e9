"""A checkpoint as a folder that can be served: embedded ones hold it already, FSDP shards go through verl's own merger.

The merged folder lies beside the checkpoint, RUN/merged/global_step_N, and is made once, by one evaluation at a time. It must
load, and must differ from the base model: a merge that gives the base back has lost the training (LoRA adapters left out, for
instance).
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slurmlight.errors import UserError
from slurmlight.files import read_json
from slurmlight.train.checkpoints import Checkpoint
from slurmlight.train.whole import unreadable

LOCK = ".lock"  # in RUN/merged, whose owner merges; it stays
WAIT_S = 0.5  # between two looks at a lock that another process holds
SHAPE_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")


def model_folder(checkpoint: Checkpoint, base: Path, waiting: Callable[[], None] = lambda: None) -> Path:
    """A whole model folder of ``checkpoint``, merged where there is none yet.

    ``waiting`` is called again and again while another process merges, and may raise to give that up.
    Raises UserError for a torn checkpoint, one of another base model, a merge that fails or that gives ``base`` back.
    """
    if not checkpoint.complete:
        raise UserError(
            f"step {checkpoint.step} cannot be evaluated, its checkpoint is not complete: {checkpoint.flaw}",
            "name another one with --step (slurmlight checkpoints RUN lists them)",
        )
    saved = checkpoint.path / "actor" / "huggingface"
    check_base(saved, base)
    if any(saved.glob("*.safetensors")):
        return check_whole(saved)
    merged = checkpoint.path.parent / "merged" / checkpoint.path.name
    if not merged.is_dir():
        if not (base / "config.json").is_file():
            raise UserError(f"the base model {base} is missing, the merge could not be checked against it", "put it back")
        with alone(merged.parent, waiting) as sure:
            if sure:
                for left in merged.parent.glob(".global_step_*.tmp"):  # of a merge that was killed
                    shutil.rmtree(left, ignore_errors=True)
            if not merged.is_dir():  # the one waited for may have made it
                merge(checkpoint.path / "actor", merged, base)
    return check_whole(merged)


@contextmanager
def alone(folder: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of ``folder``, made where it is missing. False where its file system has no locks.

    The wait is many short ones, so that a process which only notes signals still ends: ``waiting`` is asked between them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        said = False
        while (held := _locked(handle)) is None:
            if not said:
                print(f"another process merges a checkpoint in {folder}: waiting for it", flush=True)
            said = True
            waiting()
            time.sleep(WAIT_S)
        yield held
    finally:
        os.close(handle)


def _locked(handle: int) -> bool | None:
    """True: this process holds the lock; None: another one does; False: there are no locks here."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:  # better to merge than not, but then nobody knows whose leftovers are whose
        return False
    return True


def check_base(saved: Path, base: Path) -> None:
    """Raises UserError where the checkpoint's configuration is not that of ``base`` (which may be gone: nothing to compare)."""
    ours, theirs = read_json(saved / "config.json"), read_json(base / "config.json")
    if not isinstance(ours, dict):
        raise UserError(f"{saved} has no readable config.json", "the checkpoint is torn; name another one with --step")
    if isinstance(theirs, dict):
        other = [f"{key} {theirs.get(key)} -> {ours.get(key)}" for key in SHAPE_KEYS if theirs.get(key) != ours.get(key)]
        if other:
            raise UserError(
                f"the checkpoint {saved.parent.parent} is not of base model {base}: {', '.join(other)}",
                "correct actor_rollout_ref.model.path of the run, or evaluate another run",
            )


def check_whole(folder: Path) -> Path:
    """``folder`` where its weights look whole. Raises UserError."""
    files = sorted(folder.glob("*.safetensors"))
    flaws = [flaw for path in files if (flaw := unreadable(path, path.name))]
    if flaws or not files:
        raise UserError(
            f"{folder} holds no whole model: {flaws[0] if flaws else 'no *.safetensors'}", "remove it and run again"
        )
    return folder


def merge(actor: Path, merged: Path, base: Path) -> None:
    """Merge the FSDP shards in ``actor`` into ``merged``, which appears whole or not at all."""
    partial = merged.with_name(f".{merged.name}.{os.urandom(4).hex()}.tmp")  # nobody else's, on whatever node
    try:
        _call(command(actor, partial))
        check_whole(partial)
        if same_weights(partial, base):
            raise UserError(
                f"the merged weights of {actor.parent} equal the base model {base}: the merge lost what was trained",
                "for a LoRA run merge the adapter (actor/lora_adapter) into the base first and serve that by --endpoint",
            )
        try:
            os.replace(partial, merged)
        except OSError:
            if not merged.is_dir():  # without locks another one may have made it meanwhile, from the same shards
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def command(actor: Path, target: Path) -> list[str]:
    """verl's merger, the same call in 0.5 and 0.9."""
    call = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    return [*call, "--local_dir", str(actor), "--target_dir", str(target)]


def _call(argv: Sequence[str]) -> None:
    if importlib.util.find_spec("verl") is None:
        raise UserError("verl is not installed here, FSDP shards cannot be merged", "run this in the image of the run's stack")
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(
            f"verl's merger ended with {done.returncode}: {(lines or ['without a word'])[-1][:300]}", "see its message"
        )


def same_weights(one: Path, other: Path) -> bool:
    """Whether two model folders hold equal tensors under equal names, in the coarser of their two types.

    Tensor by tensor, ends at the first difference. Raises UserError where a folder cannot be read.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    def index(folder: Path) -> dict[str, Path]:
        names: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names |= dict.fromkeys(file.keys(), path)
        names.pop("lm_head.weight", None)  # tied in some files, written out in others
        return names

    def tensor(path: Path, name: str) -> torch.Tensor:
        with safe_open(path, "pt") as file:
            return file.get_tensor(name)

    try:
        ours, theirs = index(one), index(other)
        if not ours or ours.keys() != theirs.keys():
            return False
        for name in ours:
            left, right = tensor(ours[name], name), tensor(theirs[name], name)
            kind = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
            if left.shape != right.shape or not torch.equal(left.to(kind), right.to(kind)):
                return False
    except (OSError, SafetensorError) as error:
        raise UserError(f"weights of {one} or {other} cannot be read ({error})", "fetch or save them again") from None
    return True
