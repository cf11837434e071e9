"""``slurmlight image``: build a stack's image, and convert it to what a cluster's container runtime takes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Stack(StrEnum):
    seed = "seed"
    current = "current"


def register(app: typer.Typer) -> None:
    room = typer.Typer(help="Build the pinned images and convert them.", no_args_is_help=True)
    room.command()(build)
    room.command()(convert)
    app.add_typer(room, name="image")


def build(
    stack: Annotated[Stack, typer.Argument(help="package set")],
    build_arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the Dockerfile's ARGs; repeatable")] = None,
    builder_option: Annotated[list[str] | None, typer.Option(help="one more option for the builder itself; repeatable")] = None,
) -> None:
    """Build docker/STACK/Dockerfile with docker, podman or buildah, whichever works here."""
    from slurmlight.cluster import imagebuild

    name = imagebuild.build(stack.value, imagebuild.project_folder(stack.value), build_arg or [], builder_option or [], _say)
    print(f"built {name}; for a cluster: slurmlight image convert {name} build/slurmlight-{stack.value}.sif")


def convert(
    image: Annotated[str, typer.Argument(help="name in this machine's docker, podman or buildah")],
    out: Annotated[Path, typer.Argument(help=".sif for apptainer, .sqsh for pyxis and enroot, a folder for charliecloud")],
) -> None:
    """Convert a built image to a file or folder that the cluster's runtime takes."""
    from slurmlight.cluster import imagebuild

    imagebuild.convert(image, out, _say)
    print(f"made {out}")


def _say(line: str) -> None:
    print(f"+ {line}", flush=True)
