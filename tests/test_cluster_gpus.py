"""GRES and TRES texts, nvidia-smi rows, CUDA_VISIBLE_DEVICES: acceptance cases G-01 to G-08, V-01 to V-05, C-01 to C-08."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight.cluster import gpus, slurm
from slurmlight.cluster.gpus import BUSY_MIB, GpuBusy, GpuError, busy, check_free, idle_alarm, query, read_rows, visible
from slurmlight.cluster.gres import GresError, fit, read_gres, read_tres
from slurmlight.errors import UserError
from tests.slurmbed import SlurmBed
from tests.test_cluster_jobid import shim

GRES = [
    ("G-01", "gpu:a800:8(S:0-1)", {"a800": 8}),
    ("G-02", "gpu:2", {"": 2}),
    ("G-03", "gpu:a800:4(S:0-1),gpu:h20:4", {"a800": 4, "h20": 4}),
    ("G-04-null", "(null)", {}),
    ("G-04-na", "N/A", {}),
    ("G-05", "gpu:8(IDX:0-3,5)", {"": 8}),
    ("request", "gres:gpu:a800:4", {"a800": 4}),
    ("one", "gpu", {"": 1}),
    ("mig", "gpu:3g.20gb:2,gpu:1g.5gb:7(S:0)", {"3g.20gb": 2, "1g.5gb": 7}),
    ("digits", "gpu:4090:8", {"4090": 8}),
    ("others", "shard:8,nvme:1,gpu:h20:no_consume:2", {"h20": 2}),
]


@pytest.mark.parametrize(("text", "found"), [case[1:] for case in GRES], ids=[case[0] for case in GRES])
def test_gres(text: str, found: dict[str, int]) -> None:
    assert read_gres(text) == found


@pytest.mark.parametrize(
    "text", ["gres/gpu:a800=8", "gpu=8", "gpu:a800:", "gpu a800", "8"], ids=["G-06", "tres", "cut", "blank", "number"]
)
def test_gres_refuses(text: str) -> None:
    with pytest.raises(GresError) as error:
        read_gres(text)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("gres/gpu:a800=8", {"a800": 8}, id="G-06"),
        pytest.param("cpu=8,mem=64G,node=1,billing=8,gres/gpu=4,gres/gpu:a800=4", {"a800": 4}, id="both"),
        pytest.param("cpu=8,gres/gpu=4", {"": 4}, id="untyped"),
        pytest.param("cpu=8,mem=64G", {}, id="none"),
        pytest.param("", {}, id="empty"),
    ],
)
def test_tres(text: str, found: dict[str, int]) -> None:
    assert read_tres(text) == found


@pytest.mark.parametrize("text", ["gpu:a800:8", "gres/gpu=many"])
def test_tres_refuses(text: str) -> None:
    with pytest.raises(GresError):
        read_tres(text)


@given(st.text(alphabet="gpu:a801(,)=S-", max_size=16))
def test_any_gres_text_is_gpus_or_an_error(text: str) -> None:
    with contextlib.suppress(GresError):
        assert all(count >= 0 for count in read_gres(text).values())


def test_g03_request_for_one_of_two_types() -> None:
    offer = ["gpu:a800:4(S:0-1),gpu:h20:4"]
    assert fit("mixed", offer, 4, "a800") == "a800"
    with pytest.raises(UserError, match="5 GPUs"):
        fit("mixed", offer, 5, "a800")
    assert fit("mixed", offer, 8) == ""


def test_g07_mixed_partition() -> None:
    offers = ["gpu:a800:4(S:0-1)", "(null)"]
    assert fit("p", offers, 4) == "a800"  # the type goes into the job, so it lands on a node that has them
    with pytest.raises(UserError, match="'p' has none"):
        fit("p", ["(null)"], 1)


def test_g08_more_than_a_node_has() -> None:
    with pytest.raises(UserError) as error:
        fit("a800", ["gpu:a800:4"], 8)
    assert all(word in str(error.value) for word in ("8 GPUs", "at most 4", "'a800'"))


def test_unknown_type_lists_the_known() -> None:
    with pytest.raises(UserError, match="did you mean a800"):
        fit("a800", ["gpu:a800:4"], 4, "a80")


@pytest.mark.slurm
def test_g08_real_partition(cluster: SlurmBed) -> None:
    assert slurm.partition_gres("a800") == ("gpu:a800:4",)
    assert fit("a800", slurm.partition_gres("a800"), 4) == "a800"
    with pytest.raises(UserError, match="a800, urgent"):
        slurm.partition_gres("a8000")


ROWS = "0, 34447, 81920, 72\n1, 34639, 81920, 68\n2, 6, 81920, 0\n3, 0, 81920, 0\n"


def test_v01_busy_gpus() -> None:
    assert [gpu.index for gpu in busy(read_rows(ROWS))] == [0, 1]
    assert 6 * 10 < BUSY_MIB < 34_447 / 10


def test_v02_units_and_missing_values() -> None:
    (gpu,) = read_rows("0, 34447 MiB, 81920 MiB, 72 %")
    assert (gpu.used, gpu.total, gpu.utilization) == (34447, 81920, 72)
    (gpu,) = busy(read_rows("0, 34447 MiB, 81920 MiB, [N/A]"))
    assert gpu.utilization is None


def test_v03_idle_gpus_after_the_first_step() -> None:
    assert idle_alarm([80272, 6, 6, 6]).startswith("3 of 4 GPUs idle")
    assert idle_alarm([80272, 79000, 78000, 80000]) == ""


@pytest.mark.parametrize("text", ["", "No devices were found", "0, [N/A], 81920, 0", "0, 1, 2", "0, 1, 2, 3, 4"])
def test_rows_that_cannot_be_read(text: str) -> None:
    with pytest.raises(GpuError):
        read_rows(text)


def test_v04_broken_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    shim(tmp_path / "bin", "nvidia-smi", f'echo "{words}"; exit 9', monkeypatch)
    with pytest.raises(GpuError, match="NVIDIA-SMI has failed"):
        query()
    shim(tmp_path / "bin", "nvidia-smi", f'echo "{words}"', monkeypatch)  # some versions exit with 0
    with pytest.raises(GpuError):
        query()


SMI = """\
case "$*" in
*compute-apps*) echo "GPU-aa, {pid}";;
*uuid*) printf '0, GPU-aa\\n1, GPU-bb\\n2, GPU-cc\\n3, GPU-dd\\n';;
*) printf '{rows}';;
esac"""


def test_v01_v05_job_does_not_start_on_occupied_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ROWS.replace("\n", "\\n")
    shim(tmp_path / "bin", "nvidia-smi", SMI.format(pid=os.getpid(), rows=rows), monkeypatch)
    check_free(["2", "3"])
    check_free(["GPU-cc"])
    with pytest.raises(GpuError) as error:
        check_free(["0", "2"])
    assert f"pid {os.getpid()} of {gpus.owner(str(os.getpid()))}" in str(error.value)
    assert "GPU 0 (34447 of 81920 MiB)" in str(error.value)
    with pytest.raises(GpuError, match="cannot see"):
        check_free(["GPU-bb"])


def test_start_waits_for_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy_once = f"if [ -e {tmp_path}/seen ]; then echo 0, 6, 81920, 0; else touch {tmp_path}/seen; echo 0, 34447, 81920, 0; fi"
    shim(
        tmp_path / "bin",
        "nvidia-smi",
        f'case "$*" in *memory*) {busy_once};; *uuid,pid*) ;; *) echo 0, GPU-aa;; esac',
        monkeypatch,
    )
    monkeypatch.setattr(gpus, "POLL_S", 0.01)
    gpus.settle(1, "0")
    with pytest.raises(GpuError, match="names 1 GPUs, the job asked for 2"):
        gpus.settle(2, "0")


def test_start_gives_up_on_an_occupied_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim(tmp_path / "bin", "nvidia-smi", SMI.format(pid=1, rows=ROWS.replace("\n", "\\n")), monkeypatch)
    with pytest.raises(GpuBusy, match="GPU 1"):
        gpus.settle(1, "1", wait_s=0)


def test_v03_first_step_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "0, 80272, 81920, 9\\n1, 6, 81920, 0\\n2, 6, 81920, 0\\n3, 6, 81920, 0\\n"
    shim(tmp_path / "bin", "nvidia-smi", SMI.format(pid=1, rows=rows), monkeypatch)
    assert gpus.unused(4, "0,1,2,3").startswith("3 of 4 GPUs idle")
    assert gpus.unused(1, "0") == ""
    assert gpus.unused(0, None) == ""


def test_v05_only_own_gpus_count() -> None:
    rows = read_rows("".join(f"{n}, {40000 if n < 4 else 6}, 81920, 0\n" for n in range(8)))
    assert busy(rows, {4, 5, 6, 7}) == ()


UUID, MIG = "GPU-78b84756-65f8-4c1e-9d2a-0b7c5e3f1a42", "MIG-5f1c2d3e-8a7b-5c6d-9e0f-1a2b3c4d5e6f"


@pytest.mark.parametrize(
    ("value", "wanted", "count"),
    [
        pytest.param("0,1,2,3", 4, 4, id="C-01"),
        pytest.param("", 0, 0, id="C-03-none-wanted"),
        pytest.param(UUID, 1, 1, id="C-04-gpu"),
        pytest.param("0, 1, 2, 3", 4, 4, id="C-05"),
        pytest.param(None, 0, 0, id="unset-none-wanted"),
    ],
)
def test_visible(value: str | None, wanted: int, count: int) -> None:
    assert len(visible(value, wanted)) == count


@pytest.mark.parametrize(
    ("value", "wanted", "words"),
    [
        pytest.param("NoDevFiles", 4, "bound no GPU", id="C-02"),
        pytest.param("", 4, "asked for 4", id="C-03"),
        pytest.param(MIG, 1, "slice of a GPU", id="C-04-mig"),
        pytest.param("0,0", 2, "twice", id="C-06"),
        pytest.param(None, 4, "4 GPUs and CUDA_VISIBLE_DEVICES is unset", id="C-07"),
        pytest.param("0,1", 4, "names 2 GPUs, the job asked for 4", id="C-08"),
        pytest.param("0,x", 2, "no list of devices", id="words"),
        pytest.param("-1", 1, "no list of devices", id="negative"),
        pytest.param("0,,1", 2, "no list of devices", id="gap"),
        pytest.param("0,1", 0, "asked for 0", id="more-than-asked"),
    ],
)
def test_doubtful_devices_are_an_error(value: str | None, wanted: int, words: str) -> None:
    with pytest.raises(GpuError, match=words):
        visible(value, wanted)


def test_c04_mig_where_a_slice_will_do() -> None:
    assert visible(MIG, 1, whole=False) == (MIG,)


@pytest.mark.slurm
def test_c01_real_devices(cluster: SlurmBed) -> None:
    job = cluster.submit("echo $CUDA_VISIBLE_DEVICES", "--gres=gpu:a800:3")
    cluster.wait_job(job, "COMPLETED")
    assert len(visible(cluster.output(job).strip(), 3)) == 3
