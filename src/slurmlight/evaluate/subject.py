"""What is evaluated, decided once: the first attempt pins model, step and questions in EVAL/subject.json for all later ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slurmlight.agents.contract import SqlTask
from slurmlight.data.tasks import load_tasks
from slurmlight.errors import UserError
from slurmlight.evaluate.config import EvalConfig
from slurmlight.evaluate.merge import model_folder
from slurmlight.files import read_json, write_json
from slurmlight.rewards.pairs import database_set
from slurmlight.train import checkpoints
from slurmlight.train.checkpoints import Checkpoint


@dataclass(frozen=True)
class Subject:
    """``model`` is a folder, or a foreign server's model name; ``label`` is for people.

    ``data_sha256`` is over the questions asked, in order; ``databases`` names the database set that was measured on.
    """

    label: str
    model: str
    step: int | None
    questions: int
    data_sha256: str
    databases: str


def questions(config: EvalConfig) -> list[SqlTask]:
    """The questions to ask. Raises UserError: no file, no gold, no database."""
    agent = config.training().agent
    return load_tasks(
        config.data,
        config.database_dir,
        instances=config.instances,
        max_turns=agent.max_turns,
        query_timeout_s=agent.query_timeout_s,
        limit=config.limit,
    )


def pin(folder: Path, config: EvalConfig, tasks: Sequence[SqlTask], waiting: Callable[[], None] = lambda: None) -> Subject:
    """The subject of the evaluation in ``folder``, as the first attempt found it. ``waiting`` as for ``find``.

    Raises UserError: no checkpoint, torn, another base model, or questions that changed between two attempts.
    """
    digest = _digest(tasks)
    kept = read_json(folder / "subject.json")
    if isinstance(kept, dict):
        subject = Subject(**kept)
        if subject.data_sha256 != digest:
            raise UserError(
                f"{config.data} has changed since this evaluation began", "put the file back, or start over with --fresh"
            )
        if subject.step is not None and not Path(subject.model).is_dir():
            raise UserError(f"the checkpoint under evaluation is gone ({subject.model})", "start over with --fresh")
        return subject
    label, model, step = find(config, waiting)
    databases = database_set(Path(config.database_dir), {task.db_id for task in tasks})
    subject = Subject(label, model, step, len(tasks), digest, databases)
    write_json(folder / "subject.json", asdict(subject))
    return subject


def find(config: EvalConfig, waiting: Callable[[], None] = lambda: None) -> tuple[str, str, int | None]:
    """Label, model and step of what ``config`` evaluates; merges a checkpoint's shards where that was not done.

    ``waiting`` is called while another process merges, and may raise to give that up. Raises UserError.
    """
    if config.kind == "endpoint":
        return f"{config.model} at {config.endpoint}", config.model, None
    base = Path(config.training().actor_rollout_ref.model.path).absolute()
    if config.kind == "baseline":
        if not (base / "config.json").is_file():
            raise UserError(
                f"the base model {base} has no config.json", "correct model.path, or train first (tiny makes its own)"
            )
        return f"base model {base.name}", str(base), None
    found = checkpoint(Path(config.run), config.step)
    return f"{Path(config.run).name}, step {found.step}", str(model_folder(found, base, waiting)), found.step


def checkpoint(run: Path, step: int | None) -> Checkpoint:
    """The checkpoint of ``step``, complete or not; None: the newest complete one. Raises UserError where there is none."""
    known = checkpoints.scan(run)
    if step is not None:
        for one in known:
            if one.step == step:
                return one
        steps = ", ".join(str(one.step) for one in known) or "none"
        raise UserError(f"run {run.name} has no checkpoint of step {step} (steps there: {steps})", "name another --step")
    newest = checkpoints.newest_complete(run)
    if newest is None:
        torn = "; ".join(f"step {one.step}: {one.flaw}" for one in known)
        raise UserError(
            f"run {run.name} has no complete checkpoint" + (f" ({torn})" if torn else ""),
            "wait for its first save, or evaluate the model it starts from with --baseline",
        )
    return newest


def _digest(tasks: Sequence[SqlTask]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(f"{task.db_id}\0{task.question}\0{task.gold}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]
