"""``slurmlight eval`` and ``slurmlight ask``: measure a model as a job, or try it on one question."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from slurmlight.errors import UserError


class Cluster(StrEnum):
    auto = "auto"
    slurm = "slurm"
    local = "local"


Run = Annotated[str | None, typer.Argument(help="training run; by default the newest with a complete checkpoint")]
Preset = Annotated[str | None, typer.Option(help="without a training run: evaluate the base model of this preset")]
Step = Annotated[int | None, typer.Option(min=1, help="checkpoint; the newest complete one by default")]
Baseline = Annotated[bool, typer.Option("--baseline", help="the model that training starts from")]
EndpointUrl = Annotated[str | None, typer.Option("--endpoint", help="OpenAI-compatible server; its key: OPENAI_API_KEY")]
Model = Annotated[str | None, typer.Option(help="name of the model that --endpoint serves")]
Data = Annotated[str | None, typer.Option(help="parquet with question, db_id, query; default: the preset's test file")]
Samples = Annotated[int, typer.Option(min=1, help="answers a question; more than 1 gives mean@n and pass@n, no accuracy")]
Temperature = Annotated[float | None, typer.Option(help="default: 0 (greedy); with --samples the training's")]
Limit = Annotated[int | None, typer.Option(min=1, help="only the first questions")]
InFlight = Annotated[int | None, typer.Option(min=1, help="episodes in flight")]
Seed = Annotated[int, typer.Option(min=0, help="seed of sampled answers")]
Against = Annotated[str | None, typer.Option(help="an evaluation to compare with; default: one of the base model beside it")]
Name = Annotated[str | None, typer.Option(help="name of the evaluation's folder")]
Image = Annotated[str | None, typer.Option(help="container image (path or reference)")]
Runtime = Annotated[str | None, typer.Option(help="container runtime")]


def register(app: typer.Typer) -> None:
    app.command(name="eval")(evaluate)
    app.command(name="eval-batch", hidden=True)(batch)
    app.command()(ask)


def evaluate(
    run: Run = None,
    preset: Preset = None,
    step: Step = None,
    baseline: Baseline = False,
    endpoint: EndpointUrl = None,
    model: Model = None,
    data: Data = None,
    samples: Samples = 1,
    temperature: Temperature = None,
    limit: Limit = None,
    in_flight: InFlight = None,
    seed: Seed = 0,
    against: Against = None,
    name: Name = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition or profile")] = None,
    cluster: Annotated[Cluster, typer.Option(help="auto: Slurm where sbatch answers, else this machine")] = Cluster.auto,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores")] = None,
    time: Annotated[str | None, typer.Option(help="time limit in Slurm's spelling")] = None,
    account: Annotated[str | None, typer.Option()] = None,
    depend: Annotated[str | None, typer.Option(help="run after a job or training run (afterok), or afterany:ID ...")] = None,
    image: Image = None,
    runtime: Runtime = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="move an old evaluation of this name aside")] = False,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="follow it to its end")] = True,
) -> None:
    """Evaluate a checkpoint as a job. Ends with 0: complete; 3: partial; 75: stopped; 2: bad input; 1: failed."""
    from slurmlight import evaljobs, evaluating, launching

    asked = evaluating.Asked(
        run, preset, step, baseline, endpoint, model, data, samples, temperature, limit, in_flight, seed, against, name
    )
    config = evaluating.configure(asked, later=bool(depend))
    where, why = launching.choose_cluster(cluster.value, evaluating.job_preset(config), partition, False)
    flags: dict[str, Any] = {"partition": partition, "account": account, "cpus": cpus, "time": time}
    flags |= {"image": image, "runtime": runtime, "env_names": evaluating.env_names()}
    if depend:
        flags["dependency"] = launching.dependency(depend, False)
    plan = evaluating.make_plan(config, evaluating.folder_of(config, name), where, False, flags)
    raise typer.Exit(evaljobs.start(config, plan, why, fresh=fresh, follow=follow))


def batch(
    run: Run = None,
    preset: Preset = None,
    step: Step = None,
    baseline: Baseline = False,
    endpoint: EndpointUrl = None,
    model: Model = None,
    data: Data = None,
    samples: Samples = 1,
    temperature: Temperature = None,
    limit: Limit = None,
    in_flight: InFlight = None,
    seed: Seed = 0,
    against: Against = None,
    name: Name = None,
    image: Image = None,
    runtime: Runtime = None,
) -> None:
    """Evaluate inside a job that sbatch started already (slurm/eval.sbatch)."""
    from slurmlight import evaljobs, evaluating

    asked = evaluating.Asked(
        run, preset, step, baseline, endpoint, model, data, samples, temperature, limit, in_flight, seed, against, name
    )
    raise typer.Exit(evaljobs.run_here(asked, {"image": image, "runtime": runtime}))


def ask(
    question: Annotated[str, typer.Argument(help="the question, in words")],
    db: Annotated[Path, typer.Option(help="SQLite file")],
    run: Annotated[str | None, typer.Option(help="training run; by default the newest with a complete checkpoint")] = None,
    preset: Preset = None,
    step: Step = None,
    baseline: Baseline = False,
    endpoint: EndpointUrl = None,
    model: Model = None,
) -> None:
    """One question through the same agent, its steps shown."""
    from slurmlight import evaluating

    if not db.is_file():
        raise UserError(f"no database at {db}", "give an SQLite file")
    asked = evaluating.Asked(run=run, preset=preset, step=step, baseline=baseline, endpoint=endpoint, model=model)
    config = evaluating.configure(asked, questions=False)
    from slurmlight.evaluate.ask import ask as answer

    raise typer.Exit(answer(config, db.absolute(), question))
