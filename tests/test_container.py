"""Containers: the argv of every runtime, the early errors, and real commands inside Charliecloud and podman."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurmlight.cluster import binds, container, image
from slurmlight.cluster.container import check, cleanup, container_name, resolve, wrap
from slurmlight.cluster.runtimes import ADAPTERS, PROGRAMS
from slurmlight.errors import UserError
from slurmlight.plan import JobPlan

SECRET = "a\"b$c'd\nline2"
COMMAND = ["python", "-c", "print(1)"]


@pytest.fixture
def project() -> Iterator[Path]:
    """A project folder outside /tmp: Charliecloud shows the host's /tmp in every container anyway."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="slk-"))
    (folder / "src/slurmlight").mkdir(parents=True)
    (folder / "checkpoints/run").mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


def make_plan(project: Path, **changes: object) -> JobPlan:
    run = project / "checkpoints/run"
    plan = JobPlan(
        name="run", run_folder=str(run), project_folder=str(project), cluster="slurm", preset="tiny", payload=("python",)
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def sif(path: Path, arch: str = "02") -> Path:
    path.write_bytes(
        b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + arch.encode() + b"\0" * 17
    )
    return path


def squashfs(path: Path) -> Path:
    path.write_bytes(b"hsqs" + bytes(92))
    return path


def have(monkeypatch: pytest.MonkeyPatch, *runtimes: str) -> None:
    """Only these runtimes are on the node, without their real programs."""
    programs = {PROGRAMS[runtime] for runtime in runtimes}
    monkeypatch.setattr(container.resolve, "__defaults__", (lambda name: name if name in programs else None,))
    monkeypatch.setattr(container, "_has_pyxis", lambda: "pyxis" in runtimes)


def an_image(project: Path, runtime: str) -> str:
    if runtime in ("apptainer", "singularity"):
        return str(sif(project / "kit.sif"))
    if runtime in ("pyxis", "enroot"):
        return str(squashfs(project / "kit.sqsh"))
    if runtime == "charliecloud":
        (project / "image").mkdir(exist_ok=True)
        return str(project / "image")
    return "kit:seed"


CONTAINERS = sorted(set(ADAPTERS) - {"none"})


@pytest.mark.parametrize("runtime", CONTAINERS)
def test_every_runtime_names_the_environment_and_never_shows_it(
    runtime: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, runtime)
    plan = make_plan(project, image=an_image(project, runtime), gpus=4, env_names=("HF_TOKEN",))
    environ = {"HF_TOKEN": SECRET, "NCCL_DEBUG": "INFO", "SLURM_JOB_GPUS": "4,5,6,7", "CONDA_PREFIX": "/conda"}
    argv = wrap(plan, COMMAND, 3, ["SWANLAB_API_KEY"], environ=environ)
    text = "\n".join(argv)
    assert argv[-len(COMMAND) :] == COMMAND
    assert SECRET not in text and "line2" not in text and "CONDA_PREFIX" not in text
    assert "HF_TOKEN" in text and "SWANLAB_API_KEY" in text and "NCCL_DEBUG" in text
    assert "PYTHONNOUSERSITE=1" in argv and f"PYTHONPATH={project}/src" in argv
    assert f"HOME={project}/checkpoints/run/home" in argv
    assert str(project) in text


EXPECTED = {
    "apptainer": ["apptainer exec --cleanenv --no-home --nv --bind /tmp:/tmp --bind {p}:{p} --pwd {p} {image} env"],
    "singularity": ["singularity exec --cleanenv --no-home --nv --bind /tmp:/tmp --bind {p}:{p} --pwd {p} {image} env"],
    "pyxis": [
        "srun --nodes=1 --ntasks=1 --cpus-per-task=1 --overlap --unbuffered --kill-on-bad-exit=1 --export=",
        "--container-image={image} --container-name={name} --container-mounts=/tmp:/tmp,{p}:{p} --container-workdir={p} --container-env=",
        "--no-container-mount-home --no-container-remap-root --no-container-entrypoint env",
    ],
    "enroot": [
        "env ENROOT_MOUNT_HOME=n NVIDIA_VISIBLE_DEVICES=all enroot start --rw --mount=/tmp:/tmp --mount={p}:{p} --env=",
        "{image} sh -c",
    ],
    "podman": [
        "podman run --replace",
        "--device=nvidia.com/gpu=4 --device=nvidia.com/gpu=5",
        "--rm --pull=never --name={name} --user=",
        "--network=host --ipc=host",
        "--volume={p}:{p}",
        "--env=CUDA_VISIBLE_DEVICES=0,1 --workdir={p} --entrypoint= kit:seed env",
    ],
    "docker": [
        'docker run --init --ulimit=memlock=-1 --gpus="device=4,5" --rm --pull=never --name={name}',
        "--env=CUDA_VISIBLE_DEVICES=0,1 --workdir={p}",
    ],
    "charliecloud": ["ch-run --unset-env=!(CUDA_VISIBLE_DEVICES|", "--bind={p}:{p} --cd={p} {image} -- env"],
}


@pytest.mark.parametrize("runtime", CONTAINERS)
def test_argv(runtime: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, runtime)
    plan = make_plan(project, image=an_image(project, runtime), gpus=2)
    line = " ".join(wrap(plan, COMMAND, 2, environ={"SLURM_JOB_GPUS": "4,5"}))
    for part in EXPECTED[runtime]:
        assert part.format(p=project, image=plan.image, name=container_name(plan, 2)) in line


@pytest.mark.parametrize("runtime", CONTAINERS)
def test_no_gpu_flag_without_gpus(runtime: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, runtime)
    line = " ".join(wrap(make_plan(project, image=an_image(project, runtime)), COMMAND, 1, environ={"SLURM_JOB_GPUS": "0"}))
    assert "--nv" not in line.split() and "--gpus" not in line and "nvidia.com" not in line
    assert "NVIDIA_VISIBLE_DEVICES=all" not in line


def test_launcher_goes_in_front_and_carries_pyxis_flags(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ["srun", "--ntasks-per-node=1", "--unbuffered"]
    have(monkeypatch, "pyxis")
    argv = wrap(make_plan(project, image=an_image(project, "pyxis")), COMMAND, 1, launcher=launcher)
    assert argv[:3] == launcher and argv.count("srun") == 1 and any(part.startswith("--container-image=") for part in argv)
    have(monkeypatch, "apptainer")
    argv = wrap(make_plan(project, image=an_image(project, "apptainer")), COMMAND, 1, launcher=launcher)
    assert argv[:3] == launcher and argv[3] == "sh"
    assert wrap(make_plan(project), COMMAND, 1, launcher=launcher) == [*launcher, *COMMAND]


def test_without_an_image_the_command_stays_as_it_is(project: Path) -> None:
    assert wrap(make_plan(project), COMMAND, 1, ["HF_TOKEN"]) == COMMAND
    assert cleanup(make_plan(project), 1) is None


def test_container_name_tells_runs_attempts_and_roles_apart(project: Path) -> None:
    plan = make_plan(project)
    elsewhere = replace(plan, run_folder="/elsewhere/checkpoints/run")
    names = {container_name(plan, 1), container_name(plan, 2), container_name(plan, 2, "ray"), container_name(elsewhere, 1)}
    assert len(names) == 4


def test_singularity_passes_names_through_a_shell_that_execs(project: Path, tmp_path: Path) -> None:
    """Run for real with a stand-in for the program that prints the environment it was started with."""
    stand_in = tmp_path / "apptainer"
    stand_in.write_text("#!/bin/sh\nexec env\n")
    stand_in.chmod(0o755)
    plan = make_plan(project, image=str(sif(project / "kit.sif")), runtime="apptainer", env_names=("HF_TOKEN", "UNSET_ONE"))
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HF_TOKEN": SECRET}
    os_path = os.environ["PATH"]
    os.environ["PATH"] = environ["PATH"]
    try:
        argv = wrap(plan, COMMAND, 1, environ=environ)
    finally:
        os.environ["PATH"] = os_path
    out = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"APPTAINERENV_HF_TOKEN={SECRET}" in out and "UNSET_ONE" not in out


# binds


def test_links_out_of_the_project_are_bound_too(project: Path) -> None:
    (project / "data").symlink_to("/usr/local")
    sources = [bind.source for bind in binds.of_plan(make_plan(project, binds=("/usr/share:/opt/share:ro",)), ["/dev/shm"])]
    assert sorted(sources) == sorted([str(project), "/usr/local", "/tmp", "/usr/share", "/dev/shm"])


@pytest.mark.parametrize("text", ["relative", "/a:b", "/a:/b:/c:ro", "/a b", "/a,/b"])
def test_malformed_binds(text: str, project: Path) -> None:
    with pytest.raises(UserError, match=r"bind '.*' is not SOURCE"):
        binds.of_plan(make_plan(project, binds=(text,)))


# early errors: one line, before anything is started


def expect(plan: JobPlan, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        check(plan)
    text = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in text
    for word in words:
        assert word in text


def test_no_runtime_on_the_node(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch)
    expect(make_plan(project, image=str(sif(project / "kit.sif"))), "no container runtime", platform.node(), "apptainer")
    expect(make_plan(project, image=str(sif(project / "kit.sif")), runtime="apptainer"), "no container runtime")
    expect(make_plan(project, image="kit:seed"), "no container runtime", "podman")


def test_missing_unreadable_and_foreign_images(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "apptainer", "charliecloud")
    expect(make_plan(project, image="/nowhere/kit.sif"), "/nowhere/kit.sif does not exist on")
    (project / "note.sif").write_text("not an image")
    expect(make_plan(project, image="note.sif"), "neither SIF nor squashfs")
    closed = sif(project / "closed.sif")
    closed.chmod(0)
    if os.geteuid():  # root reads everything
        expect(make_plan(project, image=str(closed)), "cannot be read", "chmod")
    expect(make_plan(project, image=str(sif(project / "arm.sif", "04"))), "built for aarch64", platform.machine())


def test_image_folder_of_another_processor(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "charliecloud")
    program = project / "image/usr/bin/env"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"\x7fELF\x02\x01" + bytes(12) + (183).to_bytes(2, "little"))
    expect(make_plan(project, image="image"), "built for aarch64")


def test_runtime_and_image_must_fit(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "podman", "apptainer")
    expect(make_plan(project, image=str(sif(project / "kit.sif")), runtime="podman"), "podman cannot run", "apptainer")
    expect(make_plan(project, runtime="aptainer"), "unknown container runtime 'aptainer'", "did you mean apptainer")
    expect(make_plan(project, runtime="podman"), "no image")


def test_binds_are_looked_at(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "apptainer")
    plan = make_plan(project, image=str(sif(project / "kit.sif")))
    expect(replace(plan, binds=("/nowhere",)), "bind /nowhere does not exist")
    expect(replace(plan, binds=(f"{project}:{project}:ro",)), "makes the run folder read-only")
    expect(replace(plan, env_names=("HF_TOKEN=abc",)), "is not a name")


def test_run_folder_that_cannot_be_written(project: Path) -> None:
    expect(make_plan(project, run_folder="/proc/self"), "run folder /proc/self cannot be written")


def test_podman_without_the_image(project: Path) -> None:
    if not shutil.which("podman"):
        pytest.skip("podman is not installed")
    expect(
        make_plan(project, image="localhost/not-there:1", runtime="podman"), "localhost/not-there:1 is not on node", "podman"
    )


def test_docker_without_its_daemon(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("docker"):
        pytest.skip("docker is not installed")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    expect(make_plan(project, image="kit:seed", runtime="docker"), "daemon")


def test_detection_prefers_what_suits_the_image(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, *CONTAINERS)
    assert resolve(make_plan(project, image=an_image(project, "apptainer")))[0] == "apptainer"
    assert resolve(make_plan(project, image=an_image(project, "pyxis")))[0] == "pyxis"
    assert resolve(make_plan(project, image="kit:seed"))[0] == "podman"
    assert resolve(make_plan(project, image=an_image(project, "charliecloud")))[0] == "charliecloud"


# which image an attempt ran in


def test_another_image_on_resume_warns(project: Path) -> None:
    kit = sif(project / "kit.sif")
    plan = make_plan(project, image="kit.sif")
    assert image.record(plan, "apptainer") == ""
    assert image.record(plan, "apptainer") == ""
    kit.write_bytes(kit.read_bytes() + b"rebuilt")
    assert "another image" in image.record(plan, "apptainer")
    assert json.loads((project / "checkpoints/run/image.json").read_text())["identity"].startswith("sampled-sha256:")
    assert "no image" in image.record(replace(plan, image=""), "none")


def test_identity_sees_a_change_anywhere(tmp_path: Path) -> None:
    big = tmp_path / "big.sqsh"
    big.write_bytes(bytes(3_000_000))
    before = image.identity("big", big, "enroot")
    with big.open("r+b") as file:
        file.seek(1_234_567)
        file.write(b"x")
    assert image.identity("big", big, "enroot") != before


# real containers


@pytest.fixture
def root_folder(project: Path) -> Path:
    """An image folder that borrows the host's /usr by a bind: a real container without building one."""
    if not shutil.which("ch-run"):
        pytest.skip("charliecloud is not installed")
    folder = project / "image"
    for name in ("usr", "dev", "proc", "sys", "tmp", "etc", "root", "home"):
        (folder / name).mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (folder / "etc" / name).touch()
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    return folder


PROBE = """
import json, os, sys, site
facts = {"env": dict(os.environ), "cwd": os.getcwd(), "user_site": site.ENABLE_USER_SITE, "pid": os.getpid()}
open(sys.argv[1], "w").write(json.dumps(facts))
"""


def test_charliecloud_for_real(project: Path, root_folder: Path) -> None:
    plan = make_plan(project, image="image", binds=("/usr",), env_names=("HF_TOKEN",))
    assert check(plan) == "charliecloud"
    answer = project / "checkpoints/run/answer.json"
    argv = wrap(plan, ["/usr/bin/python3", "-c", PROBE, str(answer)], 1, environ={})
    host = {"HF_TOKEN": SECRET, "PATH": os.environ["PATH"], "CONDA_PREFIX": "/conda", "LD_LIBRARY_PATH": "/conda/lib"}
    done = subprocess.run(argv, env=host, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    facts = json.loads(answer.read_text())
    assert facts["env"]["HF_TOKEN"] == SECRET and facts["env"]["PYTHONNOUSERSITE"] == "1"
    assert "CONDA_PREFIX" not in facts["env"] and "LD_LIBRARY_PATH" not in facts["env"]
    assert facts["env"]["HOME"] == f"{project}/checkpoints/run/home" and facts["cwd"] == str(project)
    assert facts["user_site"] is False


def test_signals_reach_the_payload_in_charliecloud(project: Path, root_folder: Path) -> None:
    plan = make_plan(project, image="image", binds=("/usr",))
    check(plan)
    ready, heard = project / "checkpoints/run/ready", project / "checkpoints/run/heard"
    script = f"trap 'echo usr2 > {heard}; exit 75' USR2; echo > {ready}; while :; do sleep 0.1; done"
    process = subprocess.Popen(wrap(plan, ["sh", "-c", script], 1))
    try:
        _until(ready.exists)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(timeout=60) == 75 and heard.read_text() == "usr2\n"
    finally:
        process.kill()


def test_read_only_image_folder_without_mount_points(project: Path, root_folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    root_folder.chmod(0o555)
    expect(make_plan(project, image="image"), "has no", "to bind on")


def _until(true, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def test_podman_leftover_is_removed(project: Path, tmp_path: Path) -> None:
    """SIGKILL of the client leaves the container running: cleanup() ends it."""
    if not shutil.which("podman") or os.geteuid():
        pytest.skip("needs podman and root")
    storage = Path(tempfile.mkdtemp(prefix="slk-pod-"))
    conf = tmp_path / "storage.conf"
    conf.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{storage}/graph"\nrunroot = "{storage}/run"\n')
    os.environ["CONTAINERS_STORAGE_CONF"] = str(conf)
    try:
        _import_small_image(tmp_path)
        plan = make_plan(project, image="localhost/small:1", runtime="podman")
        assert check(plan) == "podman"
        assert image.identity(plan.image, None, "podman")
        ready = project / "checkpoints/run/ready"
        argv = wrap(plan, ["/busy", str(ready)], 1)
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        started = time.monotonic()
        while not ready.exists() and process.poll() is None and time.monotonic() < started + 60:
            time.sleep(0.1)
        if process.poll() is not None:
            pytest.skip(f"podman cannot run containers here: {process.communicate()[1].strip().splitlines()[-1]}")
        process.kill()
        process.wait()
        name = container_name(plan, 1)
        assert name in _podman("ps", "--format", "{{.Names}}")
        subprocess.run(cleanup(plan, 1) or [], check=True, capture_output=True, timeout=120)
        assert name not in _podman("ps", "--all", "--format", "{{.Names}}")
    finally:
        del os.environ["CONTAINERS_STORAGE_CONF"]
        shutil.rmtree(storage, ignore_errors=True)


def _podman(*argv: str) -> str:
    return subprocess.run(["podman", *argv], capture_output=True, text=True, timeout=120, check=True).stdout


def _import_small_image(folder: Path) -> None:
    """An image of one static program and ``env``: built here, nothing is pulled."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    (folder / "busy.c").write_text(
        '#include <stdio.h>\n#include <unistd.h>\nint main(int c, char **v) { fclose(fopen(v[1], "w")); for (;;) pause(); }\n'
    )
    (folder / "env.c").write_text(
        "#include <string.h>\n#include <unistd.h>\n"
        "int main(int c, char **v) { int i = 1; while (strchr(v[i], '=')) i++; execv(v[i], v + i); return 127; }\n"
    )
    for name in ("busy", "env"):
        subprocess.run(["cc", "-static", "-o", folder / name, folder / f"{name}.c"], check=True, timeout=120)
    archive = folder / "small.tar"
    subprocess.run(["tar", "-C", folder, "-cf", archive, "busy", "env", "--transform=s,^env$,bin/env,"], check=True)
    subprocess.run(["podman", "import", archive, "localhost/small:1"], check=True, capture_output=True, timeout=120)
