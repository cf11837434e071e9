"""`launch.py --then-eval`: a training run and, once it has finished, its evaluation as a job of its own.

Under Slurm the second job waits for the first (afterok), however often that one is requeued. On this machine the launcher
starts one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slurmlight import evaljobs, evaluating, launching, presets
from slurmlight.cluster import slurm
from slurmlight.errors import UserError
from slurmlight.evaluate.config import EvalConfig
from slurmlight.following import attend, tell
from slurmlight.plan import JobPlan
from slurmlight.presets import Preset
from slurmlight.runfolder import RunFolder

INTERRUPTED = 130  # the follower was left; both jobs go on
PARENT = "JOB"  # in a dry run's script: the id that the training job will have


@dataclass(frozen=True)
class Chained:
    """The evaluation that follows a training run; ``plan`` is complete but for the id of the job it depends on."""

    config: EvalConfig
    plan: JobPlan


def plan_after(training: JobPlan, preset: Preset, dry: bool, flags: dict[str, Any]) -> Chained:
    """The evaluation of what ``training`` will have trained, on the same partition with the same ``flags``.

    Raises UserError for a missing data file; a ``dry`` one is only shown and needs none.
    """
    run = RunFolder(training.run_folder)
    config = _shown(preset, run) if dry else evaluating.configure_after(preset, run)
    own = {key: value for key, value in flags.items() if key != "dependency"} | {"env_names": evaluating.env_names()}
    plan = evaluating.make_plan(config, evaluating.folder_of(config, None), training.cluster, dry, own)
    return Chained(config, _after(plan, PARENT) if plan.cluster == "slurm" else plan)


def _shown(preset: Preset, run: RunFolder) -> EvalConfig:
    """As much of the evaluation's configuration as its plan follows from."""
    data = preset.data.test_files or preset.data.val_files
    return EvalConfig(
        kind="checkpoint",
        preset=presets.to_json(preset),
        data=data,
        database_dir=preset.data.database_dir,
        run=str(run.path),
    )


def check_follow(plan: JobPlan, follow: bool) -> None:
    """Raises UserError where nobody would start the evaluation when the training has finished."""
    if plan.cluster == "local" and not follow:
        raise UserError(
            "--no-follow and --then-eval: nobody would be left to start the evaluation",
            f"leave one out; slurmlight eval {plan.name} evaluates later",
        )


def start(plan: JobPlan, preset: Preset, why: str, then: Chained, *, fresh: bool, follow: bool) -> int:
    """Train ``plan``, then evaluate. Returns the exit code: the training's where that did not finish."""
    check_follow(plan, follow)
    if plan.cluster == "local":
        code = launching.start(plan, preset, why, fresh=fresh, follow=True)
        return code or evaljobs.start(then.config, then.plan, why, fresh=False, follow=True)
    job = launching.begin(plan, preset, why, fresh=fresh, follow=follow)
    chained = _after(then.plan, slurm.require_parent(job))
    under_way = evaljobs.begin(then.config, chained, fresh=False, follow=follow)
    if not follow:
        return 0
    if code := attend(RunFolder(plan.run_folder), plan):
        if code != INTERRUPTED:
            tell("no evaluation: the training has not finished; the same command again goes on and chains it anew")
        return code
    if not under_way:
        return 0
    print(f"then      evaluation {evaluating.known_as(RunFolder(chained.run_folder))}", flush=True)
    return evaljobs.see_through(chained)


def _after(plan: JobPlan, job: str) -> JobPlan:
    return replace(plan, dependency=f"afterok:{job}")
