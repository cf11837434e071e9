"""Which checkpoint a resume takes, how one is written and deleted (cases K-01 to K-14), and kills at every instant."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from slurmlight.errors import UserError
from slurmlight.files import write_json
from slurmlight.runfolder import RunFolder
from slurmlight.train.checkpoints import PARTS, TRACKER, accept, clean_up, resume_point, scan, shard_name, step_folder
from slurmlight.train.saving import NoSpace, Retention, prune, saving

WORLD = 4


def zip_bytes(entries: int = 3) -> bytes:
    """What torch.save writes: an uncompressed zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(entries):
            archive.writestr(f"archive/data/{number}", bytes(64))
    return buffer.getvalue()


SHARD = zip_bytes()


def fill(path: Path, world: int = WORLD) -> None:
    (path / "actor").mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        for rank in range(world):
            (path / "actor" / shard_name(part, world, rank)).write_bytes(SHARD)
    (path / "data.pt").write_bytes(SHARD)


def put(folder: Path, *steps: int, world: int = WORLD) -> None:
    for step in steps:
        fill(step_folder(folder, step), world)


def save(folder: Path, step: int, world: int = 1) -> None:
    with saving(folder, step, world) as target:
        fill(target, world)


def track(folder: Path, text: str) -> None:
    (folder / TRACKER).write_text(text)


def tracked(folder: Path) -> str:
    return (folder / TRACKER).read_text()


def shard(folder: Path, step: int, name: str) -> Path:
    return step_folder(folder, step) / "actor" / name


def steps(folder: Path) -> list[int]:
    return [one.step for one in scan(folder)]


def test_k01_falls_back_to_the_newest_complete_step_and_names_the_missing_file(tmp_path: Path) -> None:
    put(tmp_path, 10, 20)
    shard(tmp_path, 20, "model_world_size_4_rank_3.pt").unlink()
    track(tmp_path, "20")
    found = resume_point(tmp_path, WORLD)
    assert found.step == 10 and found.path == step_folder(tmp_path, 10)
    assert any("20" in note and "model_world_size_4_rank_3.pt is missing" in note for note in found.notes)
    assert tracked(tmp_path) == "10"


@pytest.mark.parametrize("tracker", ["", "abc", None, "-1", "²", "9" * 5000])
def test_k02_a_tracker_that_holds_no_step_is_repaired(tmp_path: Path, tracker: str | None) -> None:
    put(tmp_path, 10, 20)
    if tracker is not None:
        track(tmp_path, tracker)
    found = resume_point(tmp_path, WORLD)
    assert found.step == 20 and any(TRACKER in note for note in found.notes)
    assert tracked(tmp_path) == "20"


def test_k03_a_line_end_in_the_tracker_is_no_news(tmp_path: Path) -> None:
    put(tmp_path, 20)
    track(tmp_path, "20\n")
    assert (resume_point(tmp_path, WORLD).step, resume_point(tmp_path, WORLD).notes) == (20, ())


def test_k04_a_tracker_ahead_of_the_disk_does_not_restart(tmp_path: Path) -> None:
    put(tmp_path, 20)
    track(tmp_path, "30")
    found = resume_point(tmp_path, WORLD)
    assert found.step == 20 and any("says 30" in note for note in found.notes)
    assert tracked(tmp_path) == "20"


def test_k05_an_empty_shard_is_torn(tmp_path: Path) -> None:
    put(tmp_path, 10, 20)
    shard(tmp_path, 20, "model_world_size_4_rank_2.pt").write_bytes(b"")
    found = resume_point(tmp_path, WORLD)
    assert found.step == 10 and any("rank_2.pt is empty" in note for note in found.notes)


def test_k06_without_the_data_state_a_step_is_not_complete(tmp_path: Path) -> None:
    put(tmp_path, 10, 20)
    (step_folder(tmp_path, 20) / "data.pt").unlink()
    assert resume_point(tmp_path, WORLD).step == 10
    shutil.rmtree(step_folder(tmp_path, 10))
    with pytest.raises(UserError, match="--accept 20"):
        resume_point(tmp_path, WORLD)
    accept(tmp_path, 20)
    assert resume_point(tmp_path, WORLD).step == 20


def test_k06_only_a_missing_data_state_can_be_accepted(tmp_path: Path) -> None:
    put(tmp_path, 20)
    shard(tmp_path, 20, shard_name("optim", WORLD, 0)).unlink()
    with pytest.raises(UserError, match=r"optim_world_size_4_rank_0.pt is missing"):
        accept(tmp_path, 20)
    with pytest.raises(UserError, match="no step 30"):
        accept(tmp_path, 30)


def test_k07_a_shard_cut_in_half_is_torn_although_not_empty(tmp_path: Path) -> None:
    put(tmp_path, 10, 20)
    cut = shard(tmp_path, 20, "model_world_size_4_rank_1.pt")
    cut.write_bytes(SHARD[: len(SHARD) // 2])
    found = resume_point(tmp_path, WORLD)
    assert found.step == 10 and any("rank_1.pt is torn" in note for note in found.notes)


def test_k08_another_number_of_gpus_is_refused(tmp_path: Path) -> None:
    put(tmp_path, 20, world=8)
    with pytest.raises(UserError, match="8 -> 4"):
        resume_point(tmp_path, WORLD)


def test_k08_also_where_an_older_step_would_fit(tmp_path: Path) -> None:
    put(tmp_path, 10)
    put(tmp_path, 20, world=8)
    with pytest.raises(UserError, match="8 -> 4"):
        resume_point(tmp_path, WORLD)


def test_k08_the_launch_refuses_before_it_submits(tmp_path: Path) -> None:
    from slurmlight import launching, presets
    from slurmlight.plan import make_plan

    plan = make_plan(presets.load("qwen"), name="k08", project=tmp_path, cluster="slurm", python=sys.executable)
    run = RunFolder(plan.run_folder)
    launching.check_resume(plan, run)
    put(run.path, 20, world=8)
    with pytest.raises(UserError, match="8 -> 4"):
        launching.check_resume(plan, run)
    run.mark_finished(20, attempt=1)
    launching.check_resume(plan, run)


def test_k09_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    put(tmp_path, 9, 10)
    assert resume_point(tmp_path, WORLD).step == 10


def test_k10_steps_of_which_none_is_complete_stop_the_run(tmp_path: Path) -> None:
    put(tmp_path, 10, 20)
    for step in (10, 20):
        shard(tmp_path, step, shard_name("model", WORLD, 0)).unlink()
    with pytest.raises(UserError, match=r"none is complete.*step 10.*step 20.*--fresh"):
        resume_point(tmp_path, WORLD)


def test_k10_a_tracker_whose_checkpoints_are_gone_stops_the_run(tmp_path: Path) -> None:
    track(tmp_path, "30")
    with pytest.raises(UserError, match="says 30 but no checkpoint is here"):
        resume_point(tmp_path, WORLD)


def test_an_empty_folder_starts_at_step_0(tmp_path: Path) -> None:
    assert resume_point(tmp_path, WORLD).path is None
    assert resume_point(tmp_path / "absent", WORLD).step == 0


def test_k11_retention_reads_the_disk_and_keeps_the_best(tmp_path: Path) -> None:
    put(tmp_path, 10, 20, world=1)  # of an earlier attempt
    scores = {10: 0.3, 20: 0.4, 30: 0.9, 40: 0.5, 50: float("nan")}
    for step in (30, 40, 50):
        save(tmp_path, step)
        prune(tmp_path, Retention(newest=2, best=True), {at: score for at, score in scores.items() if at <= step})
    assert steps(tmp_path) == [30, 40, 50]


def test_k12_retention_keeps_every_mth(tmp_path: Path) -> None:
    for step in (90, 100, 110, 120):
        save(tmp_path, step)
        prune(tmp_path, Retention(newest=2, every=100), {})
    assert steps(tmp_path) == [100, 110, 120]


def test_k13_the_old_one_goes_only_after_the_new_one_was_verified(tmp_path: Path) -> None:
    save(tmp_path, 20)
    with saving(tmp_path, 30) as target:
        fill(target, 1)
        assert prune(tmp_path, Retention(newest=1), {}) == []
        assert steps(tmp_path) == [20]
    assert prune(tmp_path, Retention(newest=1), {}) == [20]
    put(tmp_path, 40, world=1)
    (step_folder(tmp_path, 40) / "data.pt").unlink()  # a save that verl has not ended yet
    assert prune(tmp_path, Retention(newest=1), {}) == []
    assert steps(tmp_path) == [30, 40]


def test_torn_steps_are_pruned_once_a_newer_one_is_complete(tmp_path: Path) -> None:
    put(tmp_path, 10, 20, 30, world=1)
    (step_folder(tmp_path, 10) / "data.pt").unlink()
    assert prune(tmp_path, Retention(), {}) == [10]


def test_k14_a_disk_that_fills_up_leaves_the_old_ones(tmp_path: Path) -> None:
    save(tmp_path, 30)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NoSpace, match="step 30 is untouched") as raised, saving(tmp_path, 40) as target:
        fill(target, 1)
        with open("/dev/full", "wb") as full:
            full.write(SHARD)
    assert raised.value.errno == errno.ENOSPC
    assert sorted(tmp_path.rglob("*")) == before and tracked(tmp_path) == "30"
    assert resume_point(tmp_path, 1).step == 30


def test_k15_a_finished_run_that_starts_again_does_nothing(tmp_path: Path) -> None:
    put(tmp_path, 50)
    RunFolder(tmp_path).mark_finished(50, attempt=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    command = [sys.executable, "-m", "slurmlight.train.main", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "finished at step 50" in done.stdout, done.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_too_little_room_is_found_before_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 30)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(NoSpace, match="needed"), saving(tmp_path, 40):
        raise AssertionError("the body must not run")
    assert steps(tmp_path) == [30]


def test_what_is_written_is_verified_before_it_gets_its_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"data\.pt is missing"), saving(tmp_path, 10, WORLD) as target:
        fill(target)
        (target / "data.pt").unlink()
    with pytest.raises(OSError, match="wrong number of shards"), saving(tmp_path, 10, WORLD) as target:
        fill(target, 2)
    assert os.listdir(tmp_path) == []


# ---- random trees: the choice is the newest complete step

Damage = Callable[[Path], None]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: len(SHARD) // 2])


def _zero_head(path: Path) -> None:
    path.write_bytes(bytes(60) + path.read_bytes()[60:])


DAMAGES: dict[str, Damage] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b"") and None,
    "half": _cut,
    "zeros": lambda path: path.write_bytes(bytes(len(SHARD))) and None,
    "zero head": _zero_head,
    "text": lambda path: path.write_bytes(b"not a zip at all, though long enough to be one" * 4) and None,
}
FILES = [*(f"actor/{shard_name(part, 2, rank)}" for part in PARTS for rank in range(2)), "data.pt"]
TREES = st.dictionaries(
    st.integers(1, 300), st.none() | st.tuples(st.sampled_from(FILES), st.sampled_from(sorted(DAMAGES))), max_size=5
)
TRACKERS = st.none() | st.sampled_from(["", "abc", "7\n", "99999999", "1e3"]) | st.integers(1, 300).map(str)


@settings(max_examples=80, deadline=None)
@given(tree=TREES, tracker=TRACKERS)
def test_the_newest_complete_step_wins_in_any_tree(tree: dict[int, tuple[str, str] | None], tracker: str | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step, damage in tree.items():
            put(folder, step, world=2)
            if damage:
                DAMAGES[damage[1]](step_folder(folder, step) / damage[0])
        if tracker is not None:
            track(folder, tracker)
        complete = [step for step, damage in tree.items() if damage is None]
        if complete:
            found = resume_point(folder, 2)
            assert found.step == max(complete) and tracked(folder).strip() == str(max(complete))
            kept = prune(folder, Retention(newest=1), {})
            assert resume_point(folder, 2).step == max(complete) and max(complete) not in kept
        elif tree or tracker is not None:
            with pytest.raises(UserError):
                resume_point(folder, 2)
        else:
            assert resume_point(folder, 2).step == 0


# ---- kills: the process dies just before its n-th file operation, for every n


SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # hundreds of flushed files: no test of the disk


def _dies_at(number: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a fork that is gone before its ``number``-th file operation. Whether it got that far."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, _: object) -> None:
            nonlocal count
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.scandir"):
                count += 1
                if count >= number:
                    os._exit(9)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def _instants(before: Callable[[Path], None], work: Callable[[Path], None]) -> Iterator[Path]:
    """The folder as each kill during ``work`` leaves it, each from a fresh ``before``."""
    for number in range(1, 500):
        with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
            folder = Path(name)
            before(folder)
            reached = _dies_at(number, lambda folder=folder: work(folder))
            yield folder
            if not reached:
                assert number > 10, "the work has more operations than that"
                return
    raise AssertionError("the work does not end")


def test_a_save_killed_at_any_instant_leaves_a_step_to_resume() -> None:
    seen = set()
    for folder in _instants(lambda folder: save(folder, 10), lambda folder: save(folder, 20)):
        seen.add(resume_point(folder, 1).step)
        assert all(one.complete for one in scan(folder)) and not [name for name in os.listdir(folder) if name[0] == "."]
    assert seen == {10, 20}


@pytest.mark.parametrize("torn", [False, True])
def test_a_step_saved_again_and_killed_at_any_instant_is_never_lost(torn: bool) -> None:
    def before(folder: Path) -> None:
        save(folder, 20)
        if torn:
            put(folder, 30, world=1)
            (step_folder(folder, 30) / "data.pt").unlink()

    for folder in _instants(before, lambda folder: save(folder, 30 if torn else 20)):
        assert resume_point(folder, 1).step in ((20, 30) if torn else (20,))


def test_pruning_killed_at_any_instant_leaves_no_half_step() -> None:
    def before(folder: Path) -> None:
        for step in (10, 20, 30):
            save(folder, step)

    def work(folder: Path) -> None:
        prune(folder, Retention(newest=1), {})

    for folder in _instants(before, work):
        assert all(one.complete for one in scan(folder))
        clean_up(folder)
        assert resume_point(folder, 1).step == 30
        assert all(name.startswith("global_step_") or name == TRACKER for name in os.listdir(folder))


# ---- slurmlight checkpoints


def cli(*arguments: str):
    from slurmlight.cli.checkpoints import register

    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    folder = RunFolder(tmp_path / "checkpoints" / "spider")
    folder.path.mkdir(parents=True)
    write_json(folder.config, {})
    write_json(folder.plan, {"nodes": 1, "gpus": 4})
    return folder


def test_the_command_tells_what_a_resume_would_take(run: RunFolder) -> None:
    put(run.path, 10, 20, 30)
    shard(run.path, 30, shard_name("optim", WORLD, 2)).unlink()
    track(run.path, "30")
    run.add_metrics({"step": 20, "val/reward": 0.625})
    report = json.loads(cli("spider", "--json").output)
    assert report["resume"] == 20 and report["refused"] == ""
    assert [(row["step"], row["complete"], row["validation"]) for row in report["steps"]] == [
        (10, True, None),
        (20, True, 0.625),
        (30, False, None),
    ]
    assert report["steps"][2]["flaw"] == "actor/optim_world_size_4_rank_2.pt is missing"
    assert report["steps"][0]["bytes"] == 13 * len(SHARD)
    shown = cli("spider").output
    assert "a resume takes this one" in shown and "0.625" in shown and "rank_2.pt is missing" in shown
    assert tracked(run.path) == "30", "looking changes nothing"


def test_the_command_tells_a_refusal_and_accepts_a_step(run: RunFolder) -> None:
    put(run.path, 20)
    (step_folder(run.path, 20) / "data.pt").unlink()
    report = json.loads(cli("spider", "--json").output)
    assert report["resume"] is None and "--accept 20" in report["refused"]
    assert "refused" in cli("spider").output
    assert json.loads(cli("spider", "--json", "--accept", "20").output)["resume"] == 20


def test_the_command_on_a_run_without_checkpoints(run: RunFolder) -> None:
    assert "start from step 0" in cli("spider").output
    assert json.loads(cli("--json").output)["resume"] == 0
    assert isinstance(cli("nosuchrun").exception, UserError)


# ---- with torch, last: a fork of a process that holds torch is slow


def test_torch_and_safetensors_files_are_told_whole_from_torn(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights = pytest.importorskip("safetensors.torch")
    put(tmp_path, 10, world=1)
    target = shard(tmp_path, 10, shard_name("model", 1, 0))
    torch.save({f"layer{n}": torch.zeros(300) for n in range(40)}, target)
    whole = target.read_bytes()
    for cut in (1, 100, len(whole) // 2, len(whole) - 1):
        target.write_bytes(whole[:cut])
        assert "torn" in scan(tmp_path)[0].flaw
    target.write_bytes(bytes(len(whole) // 2) + whole[len(whole) // 2 :])  # a power cut left a hole of zeros
    assert "torn" in scan(tmp_path)[0].flaw
    target.write_bytes(whole)
    assert scan(tmp_path)[0].complete
    model = step_folder(tmp_path, 10) / "actor" / "huggingface" / "model.safetensors"
    model.parent.mkdir()
    weights.save_file({"a": torch.zeros(100), "b": torch.ones(3)}, model)
    whole = model.read_bytes()
    assert scan(tmp_path)[0].complete
    for cut in (1, 7, 20, len(whole) - 1):
        model.write_bytes(whole[:cut])
        assert scan(tmp_path)[0].flaw == "actor/huggingface/model.safetensors is torn"
    model.write_bytes(whole + b"x")
    assert not scan(tmp_path)[0].complete


def test_a_full_disk_under_torch_save_is_told_as_such(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(NoSpace, match="nothing was saved before"), saving(tmp_path, 10) as target:
        os.symlink("/dev/full", target / "actor" / shard_name("model", 1, 0))
        torch.save({"a": torch.zeros(1000)}, target / "actor" / shard_name("model", 1, 0))
