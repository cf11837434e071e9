"""Checkpoints as servable folders: whole, of the right base, and not the base itself. verl's merger is a stand-in here."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slurmlight import evaluating, presets
from slurmlight.agents.contract import Channel
from slurmlight.errors import UserError
from slurmlight.evaluate import merge, serve
from slurmlight.evaluate.config import EvalConfig
from slurmlight.evaluate.serve import Servers
from slurmlight.evaluate.subject import Subject
from slurmlight.plan import JobPlan
from slurmlight.runfolder import StopRequest
from slurmlight.train.checkpoints import inspect
from slurmlight.train.embedded.policy import PolicyServer
from slurmlight.train.rollouts.children import Child, ChildEnded, free_port
from tests import trainbed
from tests.evalbed import run_payload

CONFIG = {"model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16}


def model(folder: Path, value: float = 1.0, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {"a": torch.full((4, 4), value, dtype=dtype), "b": torch.arange(4, dtype=dtype)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def step(run: Path, number: int = 5, whole_model: bool = False) -> Path:
    """A complete step folder of one GPU; with ``whole_model`` as the embedded engine writes it."""
    path = run / f"global_step_{number}"
    hf = path / "actor/huggingface"
    hf.mkdir(parents=True)
    for part in ("model", "optim", "extra_state"):
        torch.save({"x": torch.ones(2)}, path / f"actor/{part}_world_size_1_rank_0.pt")
    torch.save({}, path / "data.pt")
    (hf / "config.json").write_text(json.dumps(CONFIG))
    if whole_model:
        model(hf, 2.0)
    return path


MERGER = """
import shutil, sys
from pathlib import Path
arguments = dict(zip(sys.argv[4::2], sys.argv[5::2]))
assert sys.argv[1:4] == ["merge", "--backend", "fsdp"], sys.argv
made = Path(arguments["--local_dir"], "merged")
if not made.exists():
    sys.exit("no shards here")
shutil.copytree(made, arguments["--target_dir"])
"""


@pytest.fixture
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package verl whose merger copies actor/merged, so that its result can be chosen."""
    package = tmp_path / "site/verl/model_merger"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(MERGER)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def left(run: Path) -> set[str]:
    return {path.name for path in (run / "merged").iterdir()} - {merge.LOCK}


@contextmanager
def another_merges(run: Path) -> Iterator[int]:
    """The lock as another process holds it; closing what is given sets it free."""
    (run / "merged").mkdir(parents=True)
    handle = os.open(run / "merged" / merge.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield handle
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def test_an_embedded_checkpoint_needs_no_merge(tmp_path: Path) -> None:
    path = step(tmp_path / "run", whole_model=True)
    assert merge.model_folder(inspect(5, path), model(tmp_path / "base")) == path / "actor/huggingface"


@pytest.mark.usefixtures("verl")
def test_shards_are_merged_once_beside_the_checkpoint(tmp_path: Path) -> None:
    path, base = step(tmp_path / "run"), model(tmp_path / "base")
    model(path / "actor/merged", 3.0, torch.bfloat16)
    found = merge.model_folder(inspect(5, path), base)
    assert found == tmp_path / "run/merged/global_step_5"
    assert load_file(found / "model.safetensors")["a"][0, 0] == 3.0
    shutil.rmtree(path / "actor/merged")
    assert merge.model_folder(inspect(5, path), base) == found, "a second call merges nothing"


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_k16_a_merge_that_gives_the_base_back_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    path, base = step(tmp_path / "run"), model(tmp_path / "base")
    model(path / "actor/merged", 1.0, dtype)
    with pytest.raises(UserError, match="equal the base model"):
        merge.model_folder(inspect(5, path), base)
    assert not left(tmp_path / "run"), "nothing is left that could be served"


@pytest.mark.usefixtures("verl")
def test_a_merger_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path, base = step(tmp_path / "run"), model(tmp_path / "base")
    with pytest.raises(UserError, match="merger ended with 1: no shards here"):
        merge.model_folder(inspect(5, path), base)
    assert not left(tmp_path / "run")


@pytest.mark.usefixtures("verl")
def test_a_merge_waits_for_another_one_and_leaves_its_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, path, base = tmp_path / "run", step(tmp_path / "run"), model(tmp_path / "base")
    model(path / "actor/merged", 3.0)
    seen: list[set[str]] = []
    with another_merges(run) as lock:
        (run / "merged/.global_step_4.1.tmp").mkdir()

        def waiting() -> None:
            seen.append(left(run))
            if len(seen) == 2:
                fcntl.flock(lock, fcntl.LOCK_UN)

        merge.model_folder(inspect(5, path), base, waiting)
    assert seen == [{".global_step_4.1.tmp"}] * 2
    assert left(run) == {"global_step_5"}, "what a killed merge left is removed, once nobody merges"
    assert capsys.readouterr().out.count("waiting for it") == 1


@pytest.mark.usefixtures("verl")
def test_what_another_process_merged_meanwhile_is_taken(tmp_path: Path) -> None:
    run, path, base = tmp_path / "run", step(tmp_path / "run"), model(tmp_path / "base")
    with another_merges(run) as lock:

        def waiting() -> None:
            model(run / "merged/global_step_5", 4.0)
            fcntl.flock(lock, fcntl.LOCK_UN)

        found = merge.model_folder(inspect(5, path), base, waiting)
    assert load_file(found / "model.safetensors")["a"][0, 0] == 4.0


@pytest.mark.usefixtures("verl")
def test_without_locks_two_merges_of_one_step_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path, base = tmp_path / "run", step(tmp_path / "run"), model(tmp_path / "base")
    model(path / "actor/merged", 3.0)
    (run / "merged/.global_step_5.1.tmp").mkdir(parents=True)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    def together(actor: Path, target: Path) -> list[str]:
        model(run / "merged/global_step_5", 4.0)
        return command(actor, target)

    command = merge.command
    monkeypatch.setattr(merge, "command", together)
    monkeypatch.setattr(fcntl, "flock", refuse)
    found = merge.model_folder(inspect(5, path), base)
    assert load_file(found / "model.safetensors")["a"][0, 0] == 4.0
    assert left(run) == {"global_step_5", ".global_step_5.1.tmp"}, "that may be another's"


def test_an_evaluation_that_waits_for_a_merge_stops_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    run = trainbed.make_run(tmp_path, "checkpoints/run", [f"actor_rollout_ref.model.path={model(tmp_path / 'base')}"])
    step(run)
    config = evaluating.configure(evaluating.Asked(run="run"))
    folder = evaluating.folder_of(config, None)
    plan = JobPlan(folder.name, str(folder.path), str(tmp_path), "local", "tiny", ("true",))
    evaluating.prepare(config, plan, fresh=False)
    folder.request_stop(StopRequest("preemption", 1))
    with another_merges(run):
        assert run_payload(folder) == 75
    assert not left(run)


def test_without_verl_shards_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="verl is not installed"):
        merge.model_folder(inspect(5, step(tmp_path / "run")), model(tmp_path / "base"))


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    path = step(tmp_path / "run", whole_model=True)
    shard = path / "actor/model_world_size_1_rank_0.pt"
    shard.write_bytes(shard.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"not complete: .*torn"):
        merge.model_folder(inspect(5, path), model(tmp_path / "base"))


def test_a_checkpoint_of_another_base_model_is_refused(tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    (base / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 16}))
    with pytest.raises(UserError, match="hidden_size 16 -> 8"):
        merge.model_folder(inspect(5, step(tmp_path / "run", whole_model=True)), base)


def test_one_changed_weight_makes_another_model(tmp_path: Path) -> None:
    base, other = model(tmp_path / "base"), model(tmp_path / "other")
    assert merge.same_weights(base, other)
    weights = load_file(other / "model.safetensors")
    weights["b"][3] += 0.5
    save_file(weights, other / "model.safetensors")
    assert not merge.same_weights(base, other)


def test_vllm_gets_one_engine_a_gpu_group_and_no_key_on_its_command_line(tmp_path: Path) -> None:
    preset = presets.load("qwen")
    assert serve.gpu_groups(preset, {"CUDA_VISIBLE_DEVICES": "4,5"}) == ["4", "5"]
    assert serve.gpu_groups(preset, {}) == ["0", "1", "2", "3"]
    two = presets.load("qwen", ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"])
    assert serve.gpu_groups(two, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == ["0,1", "2,3"]
    with pytest.raises(UserError, match="1 GPUs here, an engine of this run needs 2"):
        serve.gpu_groups(two, {"CUDA_VISIBLE_DEVICES": "3"})
    words = serve.vllm_command(tmp_path, preset, 8123, "0")
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags = dict(zip(words[3:-1:2], words[4:-1:2], strict=False))
    assert (flags["--port"], flags["--host"], flags["--model"]) == ("8123", "127.0.0.1", str(tmp_path))
    assert flags["--max-model-len"] == str(preset.data.max_prompt_length + preset.data.max_response_length)
    assert "--api-key" not in words


def test_an_engine_keeps_what_a_person_or_the_supervisor_has_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    class Recorded:
        def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str]) -> None:
            given.update(os.environ | env)

        def stop(self, patience_s: float) -> None:
            pass

    monkeypatch.setattr(serve, "Child", Recorded)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(serve.environment, "cpu", lambda *_: {"PYTHONPATH": "info:mine", "OMP_NUM_THREADS": "7"})
    kept = {"VLLM_CACHE_ROOT": "/job/vllm", "NCCL_CUMEM_ENABLE": "1", "OMP_NUM_THREADS": "2"}
    for name, value in (kept | {"CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": "mine"}).items():
        monkeypatch.setenv(name, value)
    for gpus, own in (
        ("1", {"CUDA_VISIBLE_DEVICES": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
        (serve.NO_GPU, {"PYTHONPATH": "info:mine"}),
    ):
        with serve.VllmEngine(tmp_path, presets.load("qwen"), gpus, 0, tmp_path):
            assert given.items() >= (kept | own).items()


@pytest.mark.parametrize(
    ("program", "words"),
    [("sleep 600", "gave no completion .*refused"), ("kill -9 $$", "was killed by SIGKILL")],
    ids=["alive", "dead"],
)
def test_a_policy_server_without_a_first_completion_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    class Mute(PolicyServer):
        def __enter__(self) -> PolicyServer:
            self.port = free_port()
            self.child = Child("policy server", ["sh", "-c", program], self._logs / "policy.log")
            if "kill" in program:
                self.child.process.wait()
            return self

        def __exit__(self, *_: object) -> None:
            self.child.stop()

    monkeypatch.setattr(serve, "PolicyServer", Mute)
    config = EvalConfig(kind="baseline", preset=presets.to_json(presets.load("tiny")), data="q.parquet", database_dir="d")
    with (
        pytest.raises(ChildEnded, match=words),
        serve.serving(config, Subject("base", str(tmp_path), None, 1, "", ""), tmp_path),
    ):
        pass


def test_episodes_go_to_the_least_busy_server() -> None:
    one, two = Channel("http://1", "", "m"), Channel("http://2", "", "m")
    servers = Servers([one, two])
    with servers.borrow() as first, servers.borrow() as second:
        assert {first, second} == {one, two}
        with servers.borrow():
            pass
    assert servers.busy == {one: 0, two: 0}
