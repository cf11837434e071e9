"""The doctor's findings: each pit is planted and found; exit code and JSON say the worst of them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurmlight import plan as plans
from slurmlight import presets
from slurmlight.cluster import gpus, ports
from slurmlight.doctor import Finding, examine, gpu, machine, packages, to_json, worst
from slurmlight.doctor.gpu import Driver
from slurmlight.errors import UserError
from slurmlight.files import write_json
from slurmlight.runfolder import RunFolder
from tests.shared import REPOSITORY

SEED_LOCK = packages.read_lock((REPOSITORY / "docker/seed/requirements.lock").read_text())
CURRENT_LOCK = packages.read_lock((REPOSITORY / "docker/current/requirements.lock").read_text())


def severities(findings) -> list[str]:
    return [finding.severity for finding in findings]


# packages


@pytest.mark.parametrize("lock", [SEED_LOCK, CURRENT_LOCK], ids=["seed", "current"])
def test_a_locked_set_has_no_finding(lock: dict[str, str]) -> None:
    assert len(lock) > 250
    assert severities(packages.check_lock(lock, lock, "x")) == ["ok"]
    assert severities(packages.check_pairs(lock)) == ["ok"]


def test_wrong_and_missing_pins_core_first() -> None:
    have = SEED_LOCK | {"transformers": "4.57.2", "aiohttp": "3.0.0"}
    del have["zipp"]
    missing, other = packages.check_lock(have, SEED_LOCK, "seed")
    assert missing.severity == "error" and "zipp" in missing.what
    assert other.what.index("transformers 4.57.2 (lock: 4.56.2)") < other.what.index("aiohttp 3.0.0")
    assert "docker/seed/requirements.lock" in other.mend


def test_a_local_label_is_the_same_release() -> None:
    assert severities(packages.check_lock(SEED_LOCK | {"torch": "2.8.0+cu128"}, SEED_LOCK, "seed")) == ["ok"]


def test_a_stack_that_is_not_here_is_one_finding() -> None:
    (finding,) = packages.check_lock({"typer": "0.21.0"}, SEED_LOCK, "seed")
    assert finding.severity == "error" and "not installed in this Python" in finding.what


@pytest.mark.parametrize(
    ("change", "symptom", "mend"),
    [
        ({"transformers": "5.0.0"}, "all_special_tokens_extended", "transformers>=4.55.2,<5"),
        ({"fastapi": "0.165.0"}, "_IncludedRouter", "fastapi==0.128.0 prometheus-fastapi-instrumentator==7.1.0"),
        ({"datasets": "2.14.4"}, "PyExtensionType", "datasets>=3.6"),
        ({"numpy": "2.3.5"}, "numpy 1", "numpy==1.26.4"),
        ({"xgrammar": "0.2.9", "apache-tvm-ffi": "0.1.9"}, "extra_lib_paths", "xgrammar==0.2.3"),
    ],
)
def test_every_version_pit(change: dict[str, str], symptom: str, mend: str) -> None:
    (finding,) = packages.check_pairs(SEED_LOCK | change)
    assert finding.severity == "error" and symptom in finding.why and mend in finding.mend


def test_other_python() -> None:
    assert packages.check_python((3, 11, 7)).severity == "error"
    assert packages.check_python((3, 12, 3)).severity == "ok"


# driver and GPUs

NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Sep 23 10:11:16 UTC 2025\nGCC version:  gcc 12.3.0\n"


@pytest.mark.parametrize(
    ("version", "compat", "cuda", "severity"),
    [
        ("580.95.05", False, (13, 0), "ok"),
        ("550.54.15", False, (13, 0), "error"),
        ("550.54.15", True, (13, 0), "warning"),
        ("550.54.15", False, (12, 8), "ok"),
        ("470.57.02", False, (12, 8), "error"),
    ],
)
def test_driver_against_cuda(version: str, compat: bool, cuda: tuple[int, int], severity: str) -> None:
    (finding,) = gpu.check_driver(Driver(gpu.read_driver(NVRM.format(version)), compat), cuda)
    assert finding.severity == severity and version.split(".")[0] in finding.what
    if cuda[0] == 13 and severity == "error":
        assert "seed stack" in finding.mend and "cuda-compat" in finding.mend


def test_no_driver_is_no_fault_of_a_login_node() -> None:
    assert severities(gpu.check_driver(Driver(), (13, 0))) == ["ok"]
    assert list(gpu.check_driver(Driver(), ())) == []


def test_open_kernel_module_is_read_too() -> None:
    assert gpu.read_driver("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n") == (
        580,
        95,
        5,
    )


def test_torch_version_file(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n")
    assert gpu.torch_cuda([tmp_path]) == (12, 8)
    (tmp_path / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    assert gpu.torch_cuda([tmp_path]) == ()


BUSY = "0, 34447, 81920, 72\n1, 34639, 81920, 68\n2, 6, 81920, 0\n3, 0, 81920, 0\n"  # V-01
FAILED = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."  # V-04


def rows(text: str):
    return lambda: gpus.read_rows(text)


def test_busy_gpus_of_the_job() -> None:
    found = list(gpu.check_gpus(4, "0,1,2,3", True, rows(BUSY)))
    assert severities(found) == ["error", "error"]
    assert "GPU 0 holds 34447 of 81920 MiB" in found[0].what and "--exclude" in found[0].mend


def test_only_the_jobs_own_gpus_count() -> None:
    assert severities(gpu.check_gpus(2, "2,3", True, rows(BUSY))) == ["ok"]  # V-05


def test_units_and_missing_utilisation() -> None:
    assert severities(gpu.check_gpus(1, "0", True, rows("0, 34447 MiB, 81920 MiB, [N/A]\n"))) == ["error"]  # V-02


def test_a_failing_driver_is_an_error_in_a_job_only() -> None:
    assert severities(gpu.check_gpus(4, "0,1,2,3", True, rows(FAILED))) == ["error"]
    assert severities(gpu.check_gpus(4, None, False, rows(FAILED))) == ["ok"]


@pytest.mark.parametrize("value", ["NoDevFiles", "", None, "0,0", "0,1"])
def test_doubtful_cuda_visible_devices(value: str | None) -> None:
    assert severities(gpu.check_gpus(4, value, True, rows(BUSY))) == ["error"]


# the node


def test_small_shared_memory_and_limits() -> None:
    docker_default = machine.Machine(shm=64 << 20, nofile=1024, nproc=4096, memlock=65536)
    found = list(machine.check_machine(docker_default, nodes=2))
    assert severities(found) == ["error", "warning", "warning", "warning"]
    assert "64.0 MB" in found[0].what and "--ipc=host" in found[0].mend and "ulimit -n" in found[1].mend
    assert list(machine.check_machine(machine.Machine(64 << 30, None, None, None), 2)) == []
    assert machine.machine().shm > 0


def test_disk_for_the_checkpoints(tmp_path: Path) -> None:
    assert severities(machine.check_disk(tmp_path, 20 << 30, 3, free=100 << 30)) == ["ok"]
    (short,) = machine.check_disk(tmp_path, 20 << 30, 3, free=70 << 30)
    assert short.severity == "warning" and "70.0 GB free for 4 checkpoints of about 20.0 GB" in short.what
    assert severities(machine.check_disk(tmp_path, 20 << 30, 3, free=10 << 30)) == ["error"]


def test_checkpoint_size_from_the_weights_then_from_what_is_there(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "a.safetensors").write_bytes(bytes(2000))
    (model / "config.json").write_text('{"dtype": "bfloat16"}')
    assert machine.checkpoint_bytes(run, model) == 12_000
    (model / "config.json").write_text('{"torch_dtype": "float32"}')
    assert machine.checkpoint_bytes(run, model) == 6_000
    (run / "global_step_10/actor").mkdir(parents=True)
    (run / "global_step_10/actor/model.pt").write_bytes(bytes(777))
    assert machine.checkpoint_bytes(run, model) == 777


def test_temp_path_length() -> None:
    assert machine.check_temp("/" + "x" * 42).severity == "ok"  # P-07: 43 bytes pass, 44 do not
    finding = machine.check_temp("/" + "x" * 43)
    assert finding.severity == "error" and "108 > 107" in finding.what


MOUNTS = "/dev/sda1 / ext4 rw 0 0\nfs:/home /home nfs4 rw 0 0\nx /scratch\\040a lustre rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n"


@pytest.mark.parametrize(
    ("folder", "kind", "severity"),
    [
        ("/home/u/run", "nfs4", "ok"),
        ("/scratch a/run", "lustre", "ok"),
        ("/var/run1", "ext4", "warning"),
        ("/tmp/run", "tmpfs", "warning"),
    ],
)
def test_run_folder_on_a_shared_file_system(folder: str, kind: str, severity: str) -> None:
    (finding,) = machine.check_shared(Path(folder), MOUNTS, job=True)
    assert (finding.severity, kind in finding.what) == (severity, True)
    assert severities(machine.check_shared(Path(folder), MOUNTS, job=False)) == ["ok"]


def test_a_taken_port_is_named() -> None:
    first = next(ports.candidates("4711", 1, ports.ephemeral_range()[0]))
    with socket.socket() as taken:
        taken.bind(("", first.base + 7))
        (finding,) = machine.check_ports("4711", 1)
    assert finding.severity == "ok" and f"port {first.base + 7} is in use" in finding.what


def test_no_safe_range_is_a_warning() -> None:
    assert severities(machine.check_ports("4711", 1, ephemeral=(1024, 65535))) == ["warning", "ok"]  # P-04


# the whole


def test_exit_code_is_the_worst_finding() -> None:
    well, warned, broken = (Finding("x", severity, "") for severity in ("ok", "warning", "error"))
    assert [worst([]), worst([well]), worst([well, warned]), worst([warned, broken, well])] == [0, 0, 1, 2]
    assert to_json([broken])["exit_code"] == 2


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    preset = presets.load("tiny")
    plan = plans.make_plan(preset, name="tiny", project=tmp_path, cluster="local", python=sys.executable)
    folder = RunFolder(plan.run_folder)
    folder.attempts.mkdir(parents=True)
    write_json(folder.plan, plans.to_json(plan))
    write_json(folder.config, presets.to_json(preset))
    return folder


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from slurmlight.cli import main; main()", "doctor", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300)


def test_the_command_on_a_run(run: RunFolder) -> None:
    done = doctor("--run", "tiny", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"]
    checks = {finding["check"] for finding in found["findings"]}
    assert {"python", "pairs", "libraries", "ports", "disk", "run folder"} <= checks
    assert all(finding["mend"] for finding in found["findings"] if finding["severity"] == "error")


def test_an_image_that_is_missing_is_found_before_the_job(run: RunFolder) -> None:
    plan = json.loads(run.plan.read_text()) | {"image": "/nowhere/kit.sif"}
    write_json(run.plan, plan)
    found = examine.examine(examine.subject(None, run))
    (container,) = [finding for finding in found if finding.check == "container"]
    assert container.severity == "error" and "/nowhere/kit.sif does not exist" in container.what
    assert not any(finding.check in ("lock", "libraries") for finding in found)  # the packages are in the image


def test_a_folder_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no plan"):
        examine.subject(None, RunFolder(tmp_path))


def test_a_stack_of_another_name_is_bad_input() -> None:
    done = doctor("--stack", "sead")
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_preflight_refuses_what_no_start_survives(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU job of a stack whose driver is too old ends before its payload; the tiny preset is not asked."""
    from dataclasses import replace

    from slurmlight.cluster import preflight

    plan = plans.from_json(json.loads(run.plan.read_text()))
    monkeypatch.setattr(gpu, "driver", lambda: Driver((550, 54, 15)))
    monkeypatch.setattr(gpu, "torch_cuda", lambda folders: (13, 0))
    preflight.doctor_is_content(plan, run)
    config = presets.to_json(presets.load("qwen"))
    config["engine"]["stack"] = "current"
    write_json(run.config, config)
    gpus_wanted = replace(plan, gpus=4)
    write_json(run.plan, plans.to_json(gpus_wanted))
    with pytest.raises(UserError, match=r"driver 550\.54\.15; CUDA 13\.0 needs driver 580"):
        preflight.doctor_is_content(gpus_wanted, run)
