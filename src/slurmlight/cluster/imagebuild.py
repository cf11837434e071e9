"""Build a stack's image with docker, podman or buildah, and convert it to what a cluster's runtime takes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from slurmlight.cluster import command
from slurmlight.errors import UserError
from slurmlight.files import write_atomic
from slurmlight.runfolder import home

BUILDERS = ("docker", "podman", "buildah")
ASK_DEADLINE_S = 30.0

Say = Callable[[str], None]


def find_builder(which: Callable[[str], str | None] = shutil.which) -> str:
    """The first builder that works here: docker's client alone does not count."""
    for builder in BUILDERS:
        if which(builder) and (builder != "docker" or _daemon_answers()):
            return builder
    raise UserError(
        "no docker daemon, podman or buildah here to build images with", "apt-get install buildah, or build elsewhere"
    )


def _daemon_answers() -> bool:
    return command.run("docker", "version", "--format", "{{.Server.Version}}", deadline_s=ASK_DEADLINE_S, check=False).code == 0


def tag(stack: str) -> str:
    """The image's name; podman and buildah put localhost/ before it by themselves."""
    return f"localhost/slurmlight:{stack}"


def build_argv(builder: str, stack: str, context: Path, arguments: Sequence[str], extra: Sequence[str] = ()) -> list[str]:
    """``arguments`` are NAME=VALUE build arguments, ``extra`` further options of that builder (--isolation chroot ...)."""
    verb = ["bud", "--layers"] if builder == "buildah" else ["build"]
    values = [part for argument in arguments for part in ("--build-arg", argument)]
    form = [] if builder == "docker" else ["--format", "docker"]  # keeps SHELL and HEALTHCHECK instructions readable to docker
    dockerfile = str(_dockerfile(context, stack))
    return [builder, *verb, *form, *extra, *values, "--file", dockerfile, "--tag", tag(stack), str(context)]


def project_folder(stack: str) -> Path:
    """The folder with the stack's Dockerfile: the working folder, else SLURMLIGHT_HOME, which may hold data and runs alone,
    else this checkout."""
    places = (Path.cwd(), home(), Path(__file__).parents[3])
    return next((place for place in places if _dockerfile(place, stack).is_file()), places[0])


def _dockerfile(context: Path, stack: str) -> Path:
    return context / "docker" / stack / "Dockerfile"


def build(stack: str, context: Path, arguments: Sequence[str], extra: Sequence[str], say: Say) -> str:
    """Build and return the image's name. Raises UserError with what to look at where the build fails."""
    if not _dockerfile(context, stack).is_file():
        raise UserError(f"no docker/{stack}/Dockerfile below {context}", "run this in the project folder")
    for argument in arguments:
        if "=" not in argument:
            raise UserError(f"build argument '{argument}' has no value", "write it as NAME=VALUE")
    stream(build_argv(find_builder(), stack, context, arguments, extra), say)
    return tag(stack)


def convert(image: str, out: Path, say: Say) -> None:
    """``image`` (in this machine's docker, podman or buildah) as a .sif, a .sqsh or, without suffix, a folder for ch-run.

    Nothing half-made is left under the name ``out``. Raises UserError.
    """
    builder = find_builder()
    make = {".sif": _to_sif, ".sqsh": _to_sqsh, "": _to_folder}.get(out.suffix)
    if make is None:
        raise UserError(
            f"{out} has an unknown suffix", "name it .sif (apptainer), .sqsh (pyxis, enroot) or without (charliecloud)"
        )
    if out.exists():
        raise UserError(f"{out} exists", "remove it or choose another name: a running job may use it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".image-", dir=out.parent) as work:
        made = Path(work, out.name)
        make(builder, image, made, say)
        os.rename(made, out)


def _to_sif(builder: str, image: str, made: Path, say: Say) -> None:
    program = _need(("apptainer", "singularity"), "SIF")
    if builder == "docker":
        stream([program, "build", str(made), f"docker-daemon:{image}"], say)
        return
    archive = made.with_suffix(".tar")
    stream(_save(builder, image, archive), say)
    stream([program, "build", str(made), f"docker-archive:{archive}"], say)


def _to_sqsh(builder: str, image: str, made: Path, say: Say) -> None:
    program = _need(("enroot",), "squashfs")
    if builder == "buildah":
        raise UserError("enroot imports from docker or podman, here is only buildah", "build with one of them")
    scheme = "dockerd" if builder == "docker" else "podman"
    stream([program, "import", "--output", str(made), f"{scheme}://{image}"], say)


def _to_folder(builder: str, image: str, made: Path, say: Say) -> None:
    """The flat root file system, with the image's ENV in ch/environment, where ch-run looks for it."""
    made.mkdir()
    if builder == "buildah":
        name = _words("buildah", "from", "--pull-never", image)
        try:
            rootless = ["buildah", "unshare"] if os.geteuid() else []
            stream([*rootless, "sh", "-c", 'cp -a "$(buildah mount "$0")"/. "$1"', name, str(made)], say)
        finally:
            _words("buildah", "rm", name)
    else:
        name = _words(builder, "create", image, "true")
        try:
            stream(["sh", "-c", '"$0" export "$1" | tar -C "$2" -xf -', builder, name, str(made)], say)
        finally:
            _words(builder, "rm", name)
    for folder in ("dev", "proc", "sys", "tmp", "etc", "ch"):
        (made / folder).mkdir(exist_ok=True)
    for file in ("etc/passwd", "etc/group", "etc/hosts", "etc/resolv.conf"):  # ch-run binds the host's onto them
        if not (made / file).exists():
            (made / file).unlink(missing_ok=True)  # a link to what is not in the image
            (made / file).touch()
    write_atomic(made / "ch/environment", "".join(f"{line}\n" for line in environment(builder, image)))


def environment(builder: str, image: str) -> list[str]:
    """The ENV lines of an image's configuration; those that ch-run's file cannot hold are left out."""
    if builder == "buildah":
        config = json.loads(_words("buildah", "inspect", "--type", "image", image))["OCIv1"]["config"]
    else:
        config = json.loads(_words(builder, "image", "inspect", image))[0]["Config"]
    return [line for line in config.get("Env") or [] if "\n" not in line]


def _save(builder: str, image: str, archive: Path) -> list[str]:
    if builder == "buildah":
        return ["buildah", "push", image, f"docker-archive:{archive}:{image}"]
    return ["podman", "save", "--format", "docker-archive", "--output", str(archive), image]


def _need(programs: Sequence[str], form: str) -> str:
    for program in programs:
        if shutil.which(program):
            return program
    raise UserError(
        f"{' or '.join(programs)} is not installed here, which makes {form} images", "convert on a machine that has it"
    )


def _words(*argv: str) -> str:
    return command.run(*argv, deadline_s=600.0).stdout.strip()


def stream(argv: Sequence[str], say: Say) -> None:
    """Run a long command with its output on the terminal. Raises UserError where it fails."""
    say(shlex.join(argv))
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        code = process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            process.terminate()
        process.wait()
        raise
    if code:
        raise UserError(f"{argv[0]} ended with exit code {code}", "its own words above say why")
