"""The images: locks and labels as they must be; the Dockerfiles really built; a job that trains, and is preempted, inside one.

The build takes a base made by debootstrap in place of the CUDA image, this machine's Python 3.12, and a lock shortened to the
pure-Python part; torch and the like come into the running container from this environment by a bind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurmlight import plan as plans
from slurmlight.cli import image as image_room
from slurmlight.cluster import container, imagebuild, submit
from slurmlight.doctor import packages
from slurmlight.errors import UserError
from slurmlight.files import write_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder
from tests import runs, trainbed
from tests.shared import REPOSITORY, shared
from tests.slurmbed import SlurmBed

STACKS = ("seed", "current")
PATIENCE_S = 900.0  # two cores may be shared with much else
# What the kit itself imports on the host, and the server it starts by name; all pure Python but msgspec.
SHORT = (
    "agentlightning", "click", "cloudpickle", "markdown-it-py", "mdurl", "msgspec", "pygments", "rich", "setuptools",
    "shellingham", "submitit", "typer", "typing-extensions",
)  # fmt: skip


def lock(stack: str) -> str:
    return (REPOSITORY / "docker" / stack / "requirements.lock").read_text()


def dockerfile(stack: str) -> str:
    return (REPOSITORY / "docker" / stack / "Dockerfile").read_text()


# locks and Dockerfiles as text


@pytest.mark.parametrize("stack", STACKS)
def test_locks_are_complete_and_name_no_host(stack: str) -> None:
    blocks = re.findall(r"^[A-Za-z0-9][^\n]*==[^\n]*\n(?:    [^\n]*\n)*", lock(stack), re.MULTILINE)
    assert len(blocks) > 250
    assert all("--hash=sha256:" in block for block in blocks)
    assert not re.search(r"https?://|--index|--find-links|--extra", lock(stack))


@pytest.mark.parametrize("stack", STACKS)
def test_inputs_are_in_the_lock(stack: str) -> None:
    pins = packages.read_lock((REPOSITORY / "docker" / stack / "requirements.in").read_text().replace("    #", " ;#"))
    assert pins.items() <= packages.read_lock(lock(stack)).items() and len(pins) >= 4


def test_seed_is_the_documented_set() -> None:
    known = packages.read_lock(shared("facts", "seed-pins.txt").read_text())
    locked = packages.read_lock(lock("seed"))
    assert {name: locked.get(name) for name in known} == known
    assert set(locked) - set(known) == {"sqlglot", "submitit"}


@pytest.mark.parametrize("stack", STACKS)
def test_labels_say_what_is_locked(stack: str) -> None:
    labels = dict(re.findall(r'slurmlight\.([a-z-]+)="([^"]*)"', dockerfile(stack)))
    locked = packages.read_lock(lock(stack))
    for name in ("torch", "vllm", "verl", "agentlightning", "ray", "transformers"):
        assert labels[name] == locked[name]
    assert labels["stack"] == stack


@pytest.mark.parametrize("stack", STACKS)
def test_slow_layers_come_first(stack: str) -> None:
    text = dockerfile(stack)
    order = [
        text.index(word) for word in ("apt-get", "--require-hashes -r /opt", "flash-attn.txt", "COPY src", "\nLABEL", "\nUSER ")
    ]
    assert order == sorted(order)


# builders, without building


def test_one_command_line_for_each_builder(tmp_path: Path) -> None:
    for builder, verb in (("docker", ["build"]), ("podman", ["build"]), ("buildah", ["bud", "--layers"])):
        argv = imagebuild.build_argv(builder, "seed", tmp_path, ["BASE_IMAGE=x"], ["--isolation=chroot"])
        assert argv[0] == builder and argv[1 : 1 + len(verb)] == verb
        assert argv[-5:] == [
            "--file",
            f"{tmp_path}/docker/seed/Dockerfile",
            "--tag",
            "localhost/slurmlight:seed",
            str(tmp_path),
        ]
        assert argv[argv.index("--build-arg") :][:2] == ["--build-arg", "BASE_IMAGE=x"] and "--isolation=chroot" in argv


def test_nothing_to_build_with() -> None:
    with pytest.raises(UserError, match="no docker daemon, podman or buildah"):
        imagebuild.find_builder(lambda _: None)


def test_build_argument_without_a_value() -> None:
    with pytest.raises(UserError, match="has no value"):
        imagebuild.build("seed", REPOSITORY, ["BASE_IMAGE"], [], lambda _: None)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_dockerfile_is_the_projects_wherever_data_and_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """``elsewhere``: the working folder holds none either, so this checkout's is taken."""
    project, data = tmp_path / "project", tmp_path / "data"
    for folder in (project / "docker/seed", data):
        folder.mkdir(parents=True)
    (project / "docker/seed/Dockerfile").touch()
    monkeypatch.setenv("SLURMLIGHT_HOME", str(data))
    monkeypatch.chdir(tmp_path if elsewhere else project)
    used: list[Path] = []
    monkeypatch.setattr(imagebuild, "build", lambda stack, context, *_: used.append(context) or "made")
    image_room.build(image_room.Stack.seed)
    assert used == [REPOSITORY if elsewhere else project]


# the real thing


def _missing() -> str:
    if os.geteuid():
        return "debootstrap needs root"
    absent = [name for name in ("buildah", "debootstrap", "ch-run", "apt-get") if not shutil.which(name)]
    return f"{', '.join(absent)} not found: apt-get install buildah debootstrap charliecloud" if absent else ""


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    """A folder of its own with its own image storage; skips where images cannot be built."""
    if why := _missing():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="slk-image-"))
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    os.environ["CONTAINERS_STORAGE_CONF"] = str(folder / "storage.conf")
    try:
        yield folder
    finally:
        subprocess.run(["buildah", "rm", "--all"], capture_output=True, timeout=120)
        del os.environ["CONTAINERS_STORAGE_CONF"]
        subprocess.run(["umount", folder / "graph/overlay"], capture_output=True, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def base(work: Path) -> str:
    """localhost/base:test: a minimal Debian with this machine's Python 3.12 in /usr/local."""
    root = work / "base"
    libraries = "ca-certificates,libexpat1,libffi8,libnsl2,libreadline8,libsqlite3-0,libssl3,libstdc++6,libuuid1"
    site, codename = _mirror()
    _quiet("debootstrap", "--variant=minbase", f"--include={libraries}", codename, str(root), site)
    prefix = Path(sys.base_prefix)
    skip = shutil.ignore_patterns("test", "config-3.12-*", "site-packages", "__pycache__")
    shutil.copytree(
        prefix / "lib/python3.12", root / "usr/local/lib/python3.12", symlinks=True, ignore=skip, dirs_exist_ok=True
    )
    for library in (prefix / "lib").glob("libpython3.12.so*"):
        shutil.copy(library, root / "usr/local/lib")
    shutil.copy(prefix / "bin/python3.12", root / "usr/local/bin")
    _quiet("chroot", str(root), "ldconfig")
    name = _quiet("buildah", "from", "scratch").strip()
    _quiet("buildah", "add", "--quiet", name, str(root), "/")
    _quiet("buildah", "commit", "--quiet", name, "localhost/base:test")
    _quiet("buildah", "rm", name)
    shutil.rmtree(root)
    return "localhost/base:test"


@pytest.fixture(scope="module")
def context(work: Path) -> Path:
    """What a build sees of the repository, with both locks shortened to SHORT."""
    folder = work / "context"
    for name in ("docker", "src"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", ".dockerignore"):
        shutil.copy(REPOSITORY / name, folder)
    text = (REPOSITORY / "requirements.lock").read_text()
    blocks = re.findall(r"^([a-z0-9.-]+)(==[^\n]*\n(?:    --hash[^\n]*\n)+)", text, re.MULTILINE)
    for stack in STACKS:
        short = "".join(name + rest for name, rest in blocks if name in SHORT)
        (folder / "docker" / stack / "requirements.lock").write_text(short)
    return folder


def _mirror() -> tuple[str, str]:
    """(address, release) of the distribution's packages that this machine uses."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    codename = release["VERSION_CODENAME"].strip('"')
    for line in _quiet("apt-get", "indextargets", "--format", "$(SITE) $(CODENAME) $(COMPONENT)").splitlines():
        site, name, component = ([*line.split(), "", "", ""])[:3]
        if name == codename and component == "main":
            return site, codename
    pytest.skip(f"apt names no source of {codename}")


def _quiet(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{argv[:3]}: {(done.stderr or done.stdout)[-2000:]}"
    return done.stdout


def build(stack: str, base: str, context: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    values = [f"BASE_IMAGE={base}", "IMPORTS=msgspec slurmlight", *arguments]
    mounts = [
        f"--volume={file}:{file}:ro" for file in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf") if Path(file).exists()
    ]
    argv = imagebuild.build_argv("buildah", stack, context, values, ["--isolation", "chroot", *mounts])
    return subprocess.run(argv, capture_output=True, text=True, timeout=1500)


@pytest.mark.image
def test_missing_flash_attn_hash_is_said_with_the_line_to_add(base: str, context: Path) -> None:
    done = build("seed", base, context, "FLASH_ATTN_SHA256=")
    assert done.returncode != 0
    assert "FLASH_ATTN_SHA256 is missing" in done.stderr and "--build-arg FLASH_ATTN_SHA256=<" in done.stderr


@pytest.mark.image
@pytest.mark.parametrize("stack", STACKS)
def test_both_dockerfiles_build_and_a_change_of_the_kit_keeps_the_slow_layers(stack: str, base: str, context: Path) -> None:
    done = build(stack, base, context, "FLASH_ATTN_URL=none")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert f"stack {stack}: 0 errors" in done.stdout  # the doctor ran inside
    init = context / "src/slurmlight/__init__.py"
    init.write_text(init.read_text() + f"# changed for {stack}\n")
    again = build(stack, base, context, "FLASH_ATTN_URL=none").stdout
    steps = dict(re.findall(r"STEP \d+/\d+: (.*)\n(--> Using cache)?", again))
    cached = {step: bool(mark) for step, mark in steps.items()}
    assert all(mark for step, mark in cached.items() if "require-hashes" in step or "venv" in step)
    assert not any(mark for step, mark in cached.items() if "COPY src" in step or ("/opt/kit" in step and "RUN" in step))


@pytest.fixture(scope="module")
def image(work: Path, base: str, context: Path) -> Path:
    """The current stack's image as a folder for ch-run, with this environment's packages behind its own."""
    done = build("current", base, context, "FLASH_ATTN_URL=none")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    folder = work / "slurmlight-current"
    imagebuild.convert(imagebuild.tag("current"), folder, print)
    site = folder / "opt/slurmlight/lib/python3.12/site-packages"
    (site / "zz-host.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def _plan(image: Path, run: Path, **changes: str) -> JobPlan:
    binds = (sysconfig.get_path("purelib"), str(run.parents[1]))
    plan = JobPlan(
        "inside", str(run), str(REPOSITORY), "slurm", "tiny", (sys.executable, "-m", "slurmlight.train.main", str(run))
    )
    return replace(plan, image=str(image), binds=binds, partition="a800", time="60", gpus=1, gpu_type="a800", **changes)


@pytest.mark.image
def test_what_the_image_holds(image: Path, work: Path) -> None:
    run = work / "home/checkpoints/look"
    run.mkdir(parents=True)
    plan = _plan(image, run)
    assert container.check(plan) == "charliecloud"
    facts = json.loads((image / "opt/slurmlight/image.json").read_text())
    assert facts["stack"] == "current" and facts["packages"]["msgspec"] == "0.23.0"
    assert "HF_HOME=/cache/huggingface" in (image / "ch/environment").read_text().splitlines()
    code = "import sys, slurmlight, torch; print(sys.prefix, slurmlight.__file__, torch.__version__)"
    done = subprocess.run(container.wrap(plan, ["python", "-c", code], 1), capture_output=True, text=True, timeout=300)
    prefix, kit, torch = done.stdout.split()
    assert prefix == "/opt/slurmlight" and kit == f"{REPOSITORY}/src/slurmlight/__init__.py" and torch
    assert container.record(plan) == ""
    (image / "opt/slurmlight/image.json").write_text(json.dumps(facts | {"built": "later"}))
    assert "another image" in container.record(plan)


@pytest.mark.image
@pytest.mark.slurm
def test_the_tiny_preset_trains_inside_and_survives_a_preemption(
    image: Path, work: Path, cluster: SlurmBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = work / "home"
    monkeypatch.setenv("SLURMLIGHT_HOME", str(home))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sizes = ["data.max_prompt_length=256", "data.max_response_length=16"]
    steps = ["trainer.total_training_steps=30", "trainer.save_freq=2", "trainer.test_freq=0"]
    run = RunFolder(trainbed.make_run(home, "checkpoints/inside", [*sizes, *steps]))
    write_json(run.plan, plans.to_json(_plan(image, run.path)))
    job = int(submit.submit(plans.from_json(json.loads(run.plan.read_text()))))
    runs.wait_for(lambda: len(run.metric_rows()) >= 3 or runs.outcome(run), f"three steps of {run.path}", PATIENCE_S)
    node = cluster.job(job)["BatchHost"]
    cluster.submit("sleep 1", "-p", "urgent", "-w", node, "--gres=gpu:a800:4")
    runs.wait_for(lambda: runs.outcome(run), f"the end of {run.path}", PATIENCE_S)
    assert runs.outcome(run)["state"] == "finished", _tail(run)
    assert (run.path / "global_step_30").is_dir() and len(run.metric_rows()) == 30
    kinds = [record.stop_reason or record.kind for record in runs.records(run)]
    assert kinds == ["preemption", "finished"], _tail(run)
    assert json.loads((run.path / "image.json").read_text())["runtime"] == "charliecloud"


def _tail(run: RunFolder) -> str:
    return runs.log(run)[-3000:]
