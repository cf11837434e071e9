"""What must exist before the first step: the tiny preset's data and warm-started policy, and the tasks of each split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slurmlight.agents.contract import SqlTask
from slurmlight.data import toy
from slurmlight.data.tasks import load_tasks
from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.train.embedded.warmstart import ensure_tiny_policy

TOY_SEED = 0  # of the data; runs of different engine.seed share them


def refuse(preset: Preset) -> None:
    """Raises UserError for what the schema allows and this engine does not do."""
    if preset.algorithm.use_kl_in_reward:
        raise UserError("the embedded engine has no KL penalty inside the reward", "use actor.use_kl_loss, or a verl preset")
    if preset.data.truncation != "error":
        raise UserError(
            f"the embedded engine does not cut prompts (data.truncation={preset.data.truncation})", "set it to error"
        )
    if preset.actor_rollout_ref.model.lora_rank:
        raise UserError("the embedded engine trains all weights", "set model.lora_rank to 0")
    if preset.actor_rollout_ref.rollout.temperature <= 0:
        raise UserError("rollout.temperature=0 gives equal episodes and nothing to compare", "set it above 0")


def make_tiny(preset: Preset, progress: Callable[[int, int, float], None]) -> None:
    """Generate the data and warm-start the policy, unless that was done. ``progress`` hears step, steps and loss.

    Raises UserError where a folder cannot be written or holds something else, or the train file is none that is generated.
    """
    assert preset.warmstart is not None
    data, model = Path(preset.data.train_files).parent, Path(preset.actor_rollout_ref.model.path)
    toy.refuse_others(Path(preset.data.train_files))
    if toy.ensure(data, TOY_SEED):
        print(f"generated the data in {data}: {toy.counts(data)}", flush=True)
    if ensure_tiny_policy(model, data, preset.engine.seed, preset.warmstart, progress):
        print(f"warm-started the policy in {model} ({preset.warmstart.steps} steps)", flush=True)


def load_splits(preset: Preset) -> dict[str, list[SqlTask]]:
    """The tasks of train and val, and of test and unseen where the preset names files. Raises UserError for bad data, and
    for a validation in several batches: Agent-Lightning's score would be that of the last one."""
    data, agent = preset.data, preset.agent
    files = {"train": data.train_files, "val": data.val_files, "test": data.test_files, "unseen": data.unseen_files}
    splits = {
        name: load_tasks(
            path,
            Path(path).absolute().parent / data.database_dir,
            instances=data.instances,
            max_turns=agent.max_turns,
            query_timeout_s=agent.query_timeout_s,
        )
        for name, path in files.items()
        if path
    }
    size, questions = data.val_batch_size, len(splits["val"])
    if size is not None and size < questions:
        raise UserError(
            f"data.val_batch_size={size}, but {data.val_files} has {questions} questions: they are scored in one batch",
            "leave val_batch_size out",
        )
    return splits
