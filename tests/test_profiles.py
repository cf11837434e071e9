"""Partition profiles: the shipped example, defaults under flags, and mistakes refused with the valid names."""

from __future__ import annotations

import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from slurmlight.cluster import profiles
from slurmlight.errors import UserError
from slurmlight.plan import JobPlan
from tests.shared import REPOSITORY

SHIPPED = REPOSITORY / "slurm/profiles.toml"

FULL = """
[a800]
account = "team"
gpu_type = "a800"
gpus_per_node = 4
cpus_per_node = 128
mem = "400G"
runtime = "apptainer"
image = { seed = "build/seed.sif" }
binds = ["/datasets:/datasets:ro"]
env_names = ["HF_HOME"]
modules = ["apptainer/1.3"]
scratch = "/local"

[cheap]
partition = "urgent"
image = "kit:seed"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profiles.toml"
    path.write_text(FULL)
    return path


def test_shipped_example() -> None:
    assert profiles.load("a800", SHIPPED).defaults("seed") == {"partition": "a800", "gpu_type": "a800"}


def test_every_field_is_documented_in_the_shipped_file() -> None:
    text = SHIPPED.read_text()
    missing = [name for name in profiles.Profile.__struct_fields__ if name != "name" and name not in text]
    assert missing == []


def test_commented_lines_of_the_shipped_file_are_valid(tmp_path: Path) -> None:
    lines = SHIPPED.read_text().partition("[a800]")[2].splitlines()
    active = [line.removeprefix("# ") if " = " in line else line for line in lines]
    path = tmp_path / "profiles.toml"
    path.write_text("[a800]\n" + "\n".join(active))
    found = profiles.load("a800", path).defaults("seed")
    assert found["image"] == "build/slurmlight-seed.sif" and found["runtime"] == "apptainer"


def test_defaults_are_plan_fields(file: Path) -> None:
    found = profiles.load("a800", file).defaults("seed")
    assert found["binds"] == ("/datasets:/datasets:ro",) and found["image"] == "build/seed.sif"
    assert set(found) <= {field.name for field in fields(JobPlan)}


def test_a_preset_without_a_stack_gets_no_image(file: Path) -> None:
    found = profiles.load("a800", file).defaults("none")
    assert "image" not in found and "runtime" not in found
    assert profiles.load("cheap", file).defaults("none")["image"] == "kit:seed"


def test_by_name_or_by_partition(file: Path) -> None:
    assert profiles.load("urgent", file).name == "cheap"


def test_unknown_name_lists_all_and_suggests(file: Path) -> None:
    with pytest.raises(UserError, match=r"unknown partition profile 'a8000'; did you mean a800\? valid: a800, cheap"):
        profiles.load("a8000", file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a800]\ngpu_typ = 'x'", "unknown key of profile 'a800'.*did you mean gpu_type"),
        ("[a800]\ngpus_per_node = 'four'", "Expected `int`, got `str`"),
        ("[a800]\nruntime = 'aptainer'", "did you mean apptainer"),
        ("[a800]\nimage = { sead = 'x' }", "did you mean seed"),
        ("[a800]\nmodules = ['x; touch y']", "is not a module name"),
        ("[a800]\nbinds = ['/a', 'a:b:c:d']", "profile 'a800': binds: bind 'a:b:c:d'"),
        ("[a800]\nenv_names = ['a=secret']", "profile 'a800': env_names: 'a' is not the name alone"),
        ("[a800]\nscratch = 'rel'", "profile 'a800': scratch='rel' is not an absolute path"),
        ("[a800]\nmem = 'x'", "profile 'a800': mem='x' is not an amount of memory"),
        ("account = 'x'", "stands outside a table"),
        ("[a800", "cannot be read"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        profiles.load_all(path)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_more_gpus_than_a_node_has(file: Path) -> None:
    with pytest.raises(UserError, match=r"8 GPUs a node asked for, nodes of partition a800 have 4"):
        profiles.load("a800", file).check(gpus=8)
    profiles.load("cheap", file).check(gpus=8)


def test_no_file_means_no_profiles(tmp_path: Path) -> None:
    assert profiles.load_all(tmp_path / "none.toml") == {}


def test_module_lines_load_in_a_batch_shell(tmp_path: Path) -> None:
    script = "\n".join(["module() { echo loaded $2; }", *profiles.module_lines(("apptainer/1.3", "cuda"))])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["loaded", "apptainer/1.3", "loaded", "cuda"]
