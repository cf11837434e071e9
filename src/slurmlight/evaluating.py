"""From a person's flags to an evaluation's folder with a plan in it: the host half of `slurmlight eval` (evaljobs submits).

An evaluation is a run of its own (RUN/eval/NAME, or checkpoints/NAME without a training run), so that supervisor, status,
logs and cancel treat it like any other.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from slurmlight import launching, presets
from slurmlight import plan as plans
from slurmlight.errors import UserError
from slurmlight.evaluate.config import FREE_KEYS, SERVED_IN_FLIGHT, EvalConfig, Kind, check, complete, default_name, to_json
from slurmlight.files import read_json, write_json
from slurmlight.plan import ClusterName, JobPlan
from slurmlight.presets import Preset
from slurmlight.runfolder import RunFolder, all_runs, find_run, home, is_run, launched, readable
from slurmlight.secrets import forwarded_names
from slurmlight.train import checkpoints
from slurmlight.train.config import read_preset

KEY_NAME = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Asked:
    """The flags of `slurmlight eval`; None where a person gave none."""

    run: str | None = None
    preset: str | None = None
    step: int | None = None
    baseline: bool = False
    endpoint: str | None = None
    model: str | None = None
    data: str | None = None
    samples: int = 1
    temperature: float | None = None
    limit: int | None = None
    in_flight: int | None = None
    seed: int = 0
    against: str | None = None
    name: str | None = None


def configure(asked: Asked, *, later: bool = False, questions: bool = True) -> EvalConfig:
    """What is evaluated. ``later``: a job it depends on makes the checkpoint, so none need be there yet; without
    ``questions`` no data file is looked for.

    Raises UserError for flags that contradict each other, a run without a complete checkpoint, a missing data file.
    """
    _contradictions(asked)
    run = None if asked.preset else find_run(asked.run) if asked.run else newest_run()
    with readable(run) if run else nullcontext():
        preset = read_preset(run.path) if run else presets.load(asked.preset or "")
        kind = "endpoint" if asked.endpoint else "baseline" if asked.baseline or run is None else "checkpoint"
        step = _step(run, asked.step) if kind == "checkpoint" and run and not later else asked.step
    return _config(asked, preset, run, kind, step, questions)


def configure_after(preset: Preset, run: RunFolder) -> EvalConfig:
    """The evaluation that follows the training of ``run``, which need not have begun: its last step, greedily.

    Raises UserError for a missing data file, but for a preset that makes its own.
    """
    return _config(Asked(), preset, run, "checkpoint", None, questions=preset.warmstart is None)


def _config(asked: Asked, preset: Preset, run: RunFolder | None, kind: Kind, step: int | None, questions: bool) -> EvalConfig:
    usual = home() / (preset.data.test_files or preset.data.val_files)
    file = (Path(asked.data) if asked.data else usual).absolute()
    if questions and not file.is_file():
        raise UserError(f"data file {file} does not exist", "give --data FILE, or make it with `slurmlight data`")
    temperature = asked.temperature
    if temperature is None:
        temperature = 0.0 if asked.samples == 1 else preset.actor_rollout_ref.rollout.temperature
    served = asked.endpoint or preset.engine.name != "embedded"
    return check(
        EvalConfig(
            kind=kind,
            preset=presets.to_json(_absolute(preset)),
            data=str(file),
            database_dir=str(file.parent / preset.data.database_dir),
            run=str(run.path) if run else "",
            step=step,
            endpoint=asked.endpoint or "",
            model=asked.model or "",
            instances=preset.data.instances if file.parent == usual.parent else 1,
            samples=asked.samples,
            temperature=temperature,
            seed=asked.seed,
            limit=asked.limit,
            in_flight=asked.in_flight or (SERVED_IN_FLIGHT if served else preset.runner.n_runners),
            against=str(_other(run, asked.against)) if asked.against else "",
        )
    )


def newest_run() -> RunFolder:
    """The training run launched last of those that are finished or have a complete checkpoint. Raises UserError."""
    ready = [run for run in all_runs() if _is_ready(run)]
    if not ready:
        raise UserError(f"no run under {home() / 'checkpoints'} has a complete checkpoint", "train one, or name --preset")
    return max(ready, key=launched)


def _is_ready(run: RunFolder) -> bool:
    try:
        trained = bool(run.finished() or checkpoints.newest_complete(run.path))
        return trained and not has_begun(run)  # no evaluation without a training run
    except OSError:  # one that cannot be read must be named to be asked for
        return False


def _contradictions(asked: Asked) -> None:
    if asked.run and asked.preset:
        raise UserError(f"run {asked.run} and --preset {asked.preset} are both given", "a run knows its preset: leave one out")
    if asked.endpoint and not asked.model:
        raise UserError("--endpoint needs the name of the model it serves", "give --model NAME")
    if asked.model and not asked.endpoint:
        raise UserError("--model names the model of an --endpoint", "give --endpoint too, or --step or --baseline instead")
    if sum((asked.step is not None, asked.baseline, bool(asked.endpoint))) > 1:
        raise UserError("--step, --baseline and --endpoint each say what is evaluated", "give one of them")


def _step(run: RunFolder, step: int | None) -> int:
    """Named now, so that a requeued job evaluates the same step although training may go on."""
    known = {one.step: one for one in checkpoints.scan(run.path)}
    if step is None:
        whole = [one.step for one in known.values() if one.complete]
        if not whole:
            flaws = "; ".join(f"step {one.step}: {one.flaw}" for one in known.values())
            raise UserError(
                f"run {run.name} has no complete checkpoint" + (f" ({flaws})" if flaws else ""),
                "wait for its first save (--depend RUN), or evaluate the model it starts from with --baseline",
            )
        return max(whole)
    if step not in known:
        steps = ", ".join(map(str, known)) or "none"
        raise UserError(f"run {run.name} has no checkpoint of step {step} (steps there: {steps})", "name another --step")
    if not known[step].complete:
        raise UserError(f"step {step} of run {run.name} is not complete: {known[step].flaw}", "name another --step")
    return step


def _absolute(preset: Preset) -> Preset:
    """With the model's folder as an absolute path: a job may start anywhere."""
    settings = preset.actor_rollout_ref
    model = msgspec.structs.replace(settings.model, path=str(home() / settings.model.path))
    return msgspec.structs.replace(preset, actor_rollout_ref=msgspec.structs.replace(settings, model=model))


def _other(run: RunFolder | None, text: str) -> Path:
    """The evaluation to compare with: a name beside this one, a name under checkpoints/, or a folder."""
    beside = run.path / "eval" / text if run else None
    path = beside if beside and is_run(beside) else find_run(text).path
    if not has_begun(RunFolder(path)):
        raise UserError(f"{path} is no evaluation that has begun", "name one: RUN/eval/NAME")
    return path


def folder_of(config: EvalConfig, name: str | None) -> RunFolder:
    leaf = plans.run_name(name or default_name(config))
    if config.run:
        return RunFolder(Path(config.run) / "eval" / leaf)
    return RunFolder(home() / "checkpoints" / (leaf if name else f"eval-{config.training().name}-{leaf}"))


def make_plan(config: EvalConfig, folder: RunFolder, cluster: ClusterName, dry: bool, flags: dict[str, Any]) -> JobPlan:
    """One node, and no GPU where somebody else serves."""
    plan = launching.make_plan(job_preset(config), cluster, job_name(config, folder), dry, flags)
    payload = (sys.executable, "-m", "slurmlight.evaluate.main", str(folder.path))
    return replace(plan, run_folder=str(folder.path), payload=payload)


def job_preset(config: EvalConfig) -> Preset:
    preset = config.training()
    gpus = 0 if config.kind == "endpoint" else preset.job.gpus
    return msgspec.structs.replace(preset, job=msgspec.structs.replace(preset.job, nodes=1, gpus=gpus))


def job_name(config: EvalConfig, folder: RunFolder) -> str:
    return f"{Path(config.run).name}.eval.{folder.name}"[:100] if config.run else folder.name


def known_as(folder: RunFolder) -> str:
    """What `slurmlight logs`, `status` and `cancel` know it by."""
    root = home() / "checkpoints"
    return str(folder.path.relative_to(root) if folder.path.is_relative_to(root) else folder.path)


def prepare(config: EvalConfig, plan: JobPlan, fresh: bool) -> RunFolder:
    """The folder, made or taken up again. A partial one forgets its finish mark: what was lost is asked once more.

    Raises UserError where another evaluation has begun in it, or where it cannot be written.
    """
    folder, now = RunFolder(plan.run_folder), to_json(config)
    if fresh and folder.path.exists():
        launching.move_aside(folder.path)
    before = read_json(folder.config)
    if isinstance(before, dict) and has_begun(folder):
        changed = [key for key in sorted(now) if before.get(key) != now[key] and key not in FREE_KEYS]
        if changed:
            what = (
                ", ".join(f"{key}: {before.get(key)!r} -> {now[key]!r}" for key in changed if key != "preset") or "its preset"
            )
            raise UserError(
                f"{known_as(folder)} is another evaluation ({what})", "give it another --name, or --fresh to start over"
            )
    try:
        folder.attempts.mkdir(parents=True, exist_ok=True)
        (folder.path / "outcome.json").unlink(missing_ok=True)
        if folder.finished() and not complete(folder.path):
            (folder.path / "finished.json").unlink()
        write_json(folder.config, now)
        write_json(folder.plan, plans.to_json(plan))
    except OSError as error:
        raise UserError(f"{folder.path} cannot be written ({error.strerror})", "free space or permissions there") from None
    return folder


def has_begun(folder: RunFolder) -> bool:
    """Whether an attempt decided what is evaluated: before that nothing was asked."""
    return (folder.path / "subject.json").exists()


def outdated(config: EvalConfig, folder: RunFolder) -> bool:
    """Whether ``folder`` holds an evaluation of the newest checkpoint which is not the newest any more, or soon will not be."""
    subject = read_json(folder.path / "subject.json")
    if config.kind != "checkpoint" or config.step is not None or not isinstance(subject, dict):
        return False
    run = RunFolder(config.run)
    newest = checkpoints.newest_complete(run.path)
    return run.finished() is None or newest is None or newest.step != subject.get("step")


def env_names() -> tuple[str, ...]:
    """Names of the variables a container gets: those of training, and the key of a foreign server where it is set."""
    return tuple(sorted({*forwarded_names(), *([KEY_NAME] if os.environ.get(KEY_NAME) else [])}))
