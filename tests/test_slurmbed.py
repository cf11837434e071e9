"""The test cluster itself: quick, real, and gone when its owner is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurmbed import FREEZER, NODES, SlurmBed, missing, wait_for

# usefixtures: the tests that bring up a cluster of their own are skipped (with CI=true: failed) by the same rule as the others
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]
REPOSITORY = Path(__file__).resolve().parents[1]


def test_nodes_partitions_and_gpus(cluster: SlurmBed) -> None:
    assert cluster.node_states() == dict.fromkeys(NODES, "idle")
    assert cluster.run("sinfo", "-h", "-o", "%R %G").split("\n")[:2] == ["a800 gpu:a800:4", "urgent gpu:a800:4"]
    job = cluster.submit("echo $CUDA_VISIBLE_DEVICES $SLURM_JOB_PARTITION", "--gres=gpu:a800:2")
    cluster.wait_job(job, "COMPLETED")
    assert cluster.output(job) == "0,1 a800\n"


def test_urgent_preempts(cluster: SlurmBed) -> None:
    jobs = [cluster.submit("sleep 300", "--exclusive") for _ in NODES]
    for job in jobs:
        cluster.wait_job(job, "RUNNING")
    urgent = cluster.submit("sleep 300", "-p", "urgent", "--exclusive")
    cluster.wait_job(urgent, "RUNNING")
    assert [cluster.job(job)["Restarts"] for job in jobs].count("1") == 1


def test_node_set_down(cluster: SlurmBed) -> None:
    job = cluster.submit("sleep 300")
    cluster.wait_job(job, "RUNNING")
    cluster.set_down(cluster.job(job)["NodeList"])
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", "the requeue")


def test_power_cut_takes_everything_on_the_node(cluster: SlurmBed) -> None:
    job = cluster.submit("echo $$; trap '' TERM HUP; setsid sleep 304.25 & wait")
    wait_for(lambda: cluster.output(job), "the job's first line")
    node = cluster.job(job)["NodeList"]
    sleeping = ["pgrep", "-f", "sleep 304.25"]
    assert subprocess.run(sleeping, stdout=subprocess.DEVNULL).returncode == 0
    cluster.power_cut(node)
    wait_for(lambda: subprocess.run(sleeping, stdout=subprocess.DEVNULL).returncode == 1, "its processes to be gone")


def test_nothing_stays_after_sigkill_of_the_owner() -> None:
    code = (
        "import time; from tests.slurmbed import SlurmBed\nwith SlurmBed() as bed:\n"
        " bed.wait_job(bed.submit('sleep 305.25'), 'RUNNING'); print(bed.folder, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    folder = Path(owner.stdout.readline().strip())
    assert (folder / "etc/slurm.conf").exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: not folder.exists(), "the folder to be gone")
    # the bed's keeper names the folder too, and ends a moment after it has removed it
    command = ["pgrep", "-f", f"{folder}|sleep 305.25"]
    wait_for(lambda: subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 1, "every process to be gone")
    wait_for(lambda: list(FREEZER.glob(f"bed-{owner.pid}-*")) == [], "the freezer folder to be gone")


def test_nothing_stays_after_a_normal_end() -> None:
    with SlurmBed(grace=0, user_signal=True) as bed:
        folder = bed.folder
        bed.wait_job(bed.submit("sleep 306.25"), "RUNNING")
        assert "preempt_send_user_signal" in bed.run("scontrol", "show", "config")
    assert not folder.exists()
    assert subprocess.run(["pgrep", "-f", f"{folder}|sleep 306.25"], stdout=subprocess.DEVNULL).returncode == 1


def test_command_line() -> None:
    command = [sys.executable, "tests/slurmbed.py", "bash", "-c", "sinfo -h -N -p urgent -o %N; exit 3"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (3, list(NODES))


def test_outer_slurm_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with SlurmBed() as bed:
        assert {"SBATCH_PARTITION", "SLURM_JOB_ID"}.isdisjoint(bed.env)


def test_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() == ""
    monkeypatch.setattr("tests.slurmbed.NEEDED", ("slurmctld-of-nobody",))
    assert "apt-get install slurm-wlm munge" in missing()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become a plain user")
def test_plain_user(tmp_path: Path) -> None:
    """The same cluster without root, on a copy that the user may read."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)
        for name in ("slurmbed.py", "slurmbed.conf"):
            shutil.copy(REPOSITORY / "tests" / name, folder)
        command = ["runuser", "-u", "nobody", "--", "/usr/bin/python3", f"{folder}/slurmbed.py", "srun", "-N3", "id", "-un"]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.split()) == (0, ["nobody"] * 3), done.stderr
    finally:
        shutil.rmtree(folder)
