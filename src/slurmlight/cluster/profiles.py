"""Partition profiles (slurm/profiles.toml): what is true of a cluster. A preset says what to train, a profile where."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from slurmlight.cluster import binds
from slurmlight.cluster.runtimes import ADAPTERS
from slurmlight.errors import UserError, unknown_name
from slurmlight.presets import rules
from slurmlight.runfolder import home

_MODULE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+/-]*$")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]*$")]


class Profile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of slurm/profiles.toml. Empty text, 0 and empty lists mean: left to the preset, the flags or Slurm."""

    name: Annotated[Text, Meta(description="the table's name")]
    partition: Annotated[Text, Meta(description="Slurm partition; the table's name by default")] = ""
    account: Annotated[Text, Meta(description="account to charge")] = ""
    qos: Annotated[Text, Meta(description="quality of service")] = ""
    constraint: Annotated[Text, Meta(description="node features in sbatch's spelling")] = ""
    exclude: Annotated[Text, Meta(description="nodes never to use")] = ""
    gpu_type: Annotated[Text, Meta(description="GRES type of the GPUs")] = ""
    gpus_per_node: Annotated[int, Meta(ge=0, description="GPUs a node has")] = 0
    cpus_per_node: Annotated[int, Meta(ge=0, description="CPU cores a node has")] = 0
    mem: Annotated[Text, Meta(description="memory to ask of a node (200G); 0: all of it")] = ""
    runtime: Annotated[Text, Meta(description="container runtime; empty: what the node has")] = ""
    image: Annotated[
        Text | dict[str, Text], Meta(description="image of every job, or a table of one for each stack: seed, current")
    ] = ""
    binds: Annotated[tuple[Text, ...], Meta(description="SOURCE[:TARGET][:ro] beside project, run and data folders")] = ()
    env_names: Annotated[tuple[Text, ...], Meta(description="environment variables handed to the job, by name")] = ()
    modules: Annotated[tuple[Text, ...], Meta(description="environment modules loaded before the job starts")] = ()
    scratch: Annotated[Text, Meta(description="node-local folder for temporary files and caches; empty: /tmp")] = ""

    def defaults(self, stack: str = "none") -> dict[str, Any]:
        """What the profile sets, under JobPlan's field names; flags win over it. ``stack`` is the preset's engine.stack."""
        image = self.image.get(stack, "") if isinstance(self.image, dict) else self.image
        keys = ("account", "qos", "constraint", "exclude", "gpu_type", "mem", "binds", "env_names", "modules", "scratch")
        found = {key: getattr(self, key) for key in keys} | {"partition": self.partition or self.name}
        if image:
            found |= {"image": image, "runtime": self.runtime}
        return {key: value for key, value in found.items() if value not in ("", ())}

    def check(self, gpus: int, cpus: int = 0) -> None:
        """Raises UserError where a node of this partition has fewer GPUs or cores than asked for."""
        for kind, asked, has in (("GPUs", gpus, self.gpus_per_node), ("CPU cores", cpus, self.cpus_per_node)):
            if has and asked > has:
                raise UserError(
                    f"{asked} {kind} a node asked for, nodes of partition {self.partition or self.name} have {has}",
                    f"ask for {has} or fewer, or correct the profile '{self.name}'",
                )


def load_all(path: Path | None = None) -> dict[str, Profile]:
    """Every profile by name; none where there is no file. Raises UserError for a file that cannot be used."""
    path = path or default_path()
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "correct that line") from None
    return {name: _profile(name, table, path) for name, table in tables.items()}


def load(name: str, path: Path | None = None) -> Profile:
    """The profile called ``name``, else the first one of that partition. Raises UserError listing the valid names."""
    known = load_all(path)
    named = known.get(name) or next((one for one in known.values() if one.partition == name), None)
    if named is None:
        raise unknown_name("partition profile", name, known)
    return named


def default_path() -> Path:
    """SLURMLIGHT_PROFILES, else slurm/profiles.toml of the working folder, else the one beside this checkout's source."""
    if given := os.environ.get("SLURMLIGHT_PROFILES"):
        return Path(given)
    places = (home() / "slurm/profiles.toml", Path(__file__).parents[3] / "slurm/profiles.toml")
    return next((place for place in places if place.is_file()), places[0])


def module_lines(modules: tuple[str, ...]) -> list[str]:
    """Job script lines that load environment modules; a batch shell may not have the ``module`` function yet."""
    if not modules:
        return []
    find = 'type module >/dev/null 2>&1 || for f in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do [ -r "$f" ] && . "$f"; done'
    return [find, *(f"module load {name}" for name in modules)]


def _profile(name: str, table: Any, path: Path) -> Profile:
    if not isinstance(table, dict):
        raise UserError(f"{path}: '{name}' stands outside a table", f"put it under [{name}] or the table it belongs to")
    known = [field for field in Profile.__struct_fields__ if field != "name"]
    for key in table:
        if key not in known:
            raise unknown_name(f"key of profile '{name}' in {path}:", key, known)
    try:
        profile = msgspec.convert({"name": name, **table}, Profile)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: profile '{name}': {error}", "correct that value") from None
    _check_words(profile, path)
    return profile


def _check_words(profile: Profile, path: Path) -> None:
    """Modules go into a job script, runtimes and stacks are known names: refused here rather than on the node."""
    for error in _errors(profile):
        raise UserError(f"{path}: profile '{profile.name}': {error.what}", error.mend)
    for module in profile.modules:
        if not _MODULE.match(module):
            raise UserError(
                f"{path}: profile '{profile.name}': module {module!r} is not a module name", "write it as name/version"
            )
    if profile.runtime and profile.runtime not in ADAPTERS:
        raise unknown_name("container runtime", profile.runtime, ADAPTERS)
    if isinstance(profile.image, dict):
        for stack in profile.image:
            if stack not in ("seed", "current"):
                raise unknown_name(f"stack in the images of profile '{profile.name}':", stack, ("seed", "current"))


def _errors(profile: Profile) -> Iterator[UserError]:
    yield from rules.memory("mem", profile.mem)
    for bind in profile.binds:
        try:
            binds.parse(bind)
        except UserError as error:
            yield UserError(f"binds: {error.what}", error.mend)
    for name in profile.env_names:
        if not _VARIABLE.fullmatch(name):  # what follows a '=' may be a secret
            yield UserError(f"env_names: {name.partition('=')[0]!r} is not the name alone", "values stay in your environment")
    if profile.scratch and not re.fullmatch(r"/[^,:\s]*", profile.scratch):  # containers bind it
        yield UserError(
            f"scratch={profile.scratch!r} is not an absolute path without blanks, commas and colons", "for instance /local"
        )
