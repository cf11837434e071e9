"""The tiny policy: the same bytes from the same seed, whole or not at all, and a tokenizer that fits the preset's lengths."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from slurmlight import presets
from slurmlight.agents.prompts import Prompts
from slurmlight.data import toy
from slurmlight.data.tasks import load_tasks
from slurmlight.errors import UserError
from slurmlight.presets.schema import WarmStartSection
from slurmlight.sql.execute import execute
from slurmlight.train.embedded import tinymodel
from slurmlight.train.embedded.demos import Demonstrator, singular_tables, with_habits
from slurmlight.train.embedded.prepare import make_tiny
from slurmlight.train.embedded.warmstart import STALE_S, encode, ensure_tiny_policy

SHORT = WarmStartSection(steps=5, clean_steps=3, batch_size=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    toy.ensure(folder, 0)
    return folder


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    losses: list[float] = []
    recipe = WarmStartSection(steps=40, clean_steps=38, batch_size=8)
    assert ensure_tiny_policy(folder, data, 0, recipe, lambda step, steps, loss: losses.append(loss))
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    return folder


@pytest.fixture(scope="module")
def source(data: Path) -> Demonstrator:
    return Demonstrator(data, random.Random(1))


@pytest.fixture(scope="module")
def tokenizer(source: Demonstrator) -> PreTrainedTokenizerFast:
    return tinymodel.build_tokenizer(source.texts())


def sha256(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_same_seed_same_bytes_whatever_the_threads_and_random_states(data: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    ensure_tiny_policy(tmp_path / "a", data, 7, SHORT)
    torch.manual_seed(5)
    random.seed(5)
    torch.set_num_threads(2)
    try:
        ensure_tiny_policy(tmp_path / "b", data, 7, SHORT)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert sha256(tmp_path / "a") == sha256(tmp_path / "b")
    (tmp_path / "b/model.safetensors").unlink()
    assert ensure_tiny_policy(tmp_path / "b", data, 7, SHORT)  # a folder that is not whole is made anew
    assert sha256(tmp_path / "a") == sha256(tmp_path / "b")
    ensure_tiny_policy(tmp_path / "b", data, 8, SHORT)
    assert sha256(tmp_path / "a")["model.safetensors"] != sha256(tmp_path / "b")["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_it_is_trained_once_per_recipe_and_the_clean_snapshot_is_kept(trained: Path, data: Path) -> None:
    before = sha256(trained)
    assert not ensure_tiny_policy(trained, data, 0, WarmStartSection(steps=40, clean_steps=38, batch_size=8))
    assert sha256(trained) == before
    assert before["clean/model.safetensors"] != before["model.safetensors"]
    assert before["clean/tokenizer.json"] == before["tokenizer.json"]


def test_it_is_a_hugging_face_model(trained: Path) -> None:
    for folder in (trained, trained / "clean"):
        model, loaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert type(model).__name__ == "Qwen3ForCausalLM"
        assert 300_000 < model.num_parameters() < 500_000
        assert len(loaded) == tinymodel.VOCABULARY == model.config.vocab_size
        assert model.generation_config.eos_token_id == loaded.eos_token_id == loaded.convert_tokens_to_ids("<|im_end|>")


def test_render_is_the_chat_template(trained: Path, source: Demonstrator) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained)
    for _ in range(20):
        prompt = source.draw(habits=True).prompt
        for thinking in ({}, {"enable_thinking": False}):
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **thinking)
            assert text == tinymodel.render(prompt)


def test_every_prompt_and_answer_fits_the_preset(source: Demonstrator, tokenizer: PreTrainedTokenizerFast, data: Path) -> None:
    limits = presets.load("tiny").data
    for split in ("warm", "val", "test"):
        for task in load_tasks(data / f"{split}.parquet"):
            answer = tokenizer.encode(task.gold + tinymodel.END)
            assert len(answer) <= limits.max_response_length, task.gold
            assert tokenizer.decode(answer[:-1]) == task.gold
    prompts = Prompts(compact=True)
    worst = max(source.contexts.values(), key=lambda text: len(tokenizer.encode(text)))
    longest_answer, longest_error = "x" * limits.max_response_length, "Error: " + "x" * 60
    tokens = tokenizer.encode(tinymodel.render(prompts.rewrite(worst, longest_answer, longest_error)))
    assert len(tokens) <= limits.max_prompt_length


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer.encode("1234567890")) == 10
    for text in ("größe 'x' < 3", "日本 <think>\n\n</think>", "\x00\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_repairs_carry_the_agents_own_feedback_and_end_in_the_gold(source: Demonstrator) -> None:
    golds = {task.gold for task in source.tasks}
    seen = set()
    for _ in range(300):
        one = source.draw(habits=False)
        assert one.answer in golds
        if len(one.prompt) == 3:
            seen.add(one.prompt[2]["content"].split(":")[0])
    assert seen == {"Error", "The result is empty."}


def test_habits_are_bad_but_not_the_only_form(source: Demonstrator) -> None:
    rng = random.Random(0)
    gold = next(task for task in source.tasks if ">=" in task.gold and task.extra["family"] == "where")
    forms = [with_habits(gold.gold, rng) for _ in range(200)]
    assert 100 < sum(form != gold.gold for form in forms) < 180
    assert execute(gold.database, next(form for form in forms if form != gold.gold)).kind == "rows"
    assert "no such table" in execute(gold.database, singular_tables(gold.gold)).message


def test_an_answer_is_learned_behind_its_prompt(source: Demonstrator, tokenizer: PreTrainedTokenizerFast) -> None:
    one = source.draw(habits=False)
    tokens, prompt = encode(tokenizer, one)
    assert tokenizer.decode(tokens[:prompt]) == tinymodel.render(one.prompt)
    assert tokenizer.decode(tokens[prompt:]) == one.answer + tinymodel.END


def test_an_interrupted_training_changes_nothing_and_leaves_nothing(trained: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "m")
    before = sha256(tmp_path / "m")

    def stop(step: int, steps: int, loss: float) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_tiny_policy(tmp_path / "m", data, 1, SHORT, stop)
    assert sha256(tmp_path / "m") == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_a_killed_training_left_is_swept_up_later(data: Path, tmp_path: Path) -> None:
    old, new = tmp_path / ".m-old", tmp_path / ".m-new"
    for folder in (old, new):
        (folder / "new").mkdir(parents=True)
    os.utime(old, (1, 1))
    assert os.stat(new).st_mtime > STALE_S
    ensure_tiny_policy(tmp_path / "m", data, 0, SHORT)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m-new", "m"]


def test_bad_places_are_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("")
    with pytest.raises(UserError, match="holds something that is not a generated tiny policy"):
        ensure_tiny_policy(tmp_path / "mine", data, 0, SHORT)
    with pytest.raises(UserError, match=r"warm\.parquet cannot be read.*slurmlight data toy"):
        ensure_tiny_policy(tmp_path / "m", tmp_path / "nothing", 0, SHORT)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the tiny policy"):
        ensure_tiny_policy(tmp_path / "file/m", data, 0, SHORT)
    with pytest.raises(UserError, match=r"cannot write the tiny policy to .*Not a directory"):
        ensure_tiny_policy(tmp_path / "file", data, 0, SHORT)


def test_data_are_not_generated_for_a_train_file_that_is_none_of_them(tmp_path: Path) -> None:
    preset = presets.load("tiny", [f"data.train_files={tmp_path}/nope.parquet"])
    with pytest.raises(UserError, match="none of the generated files"):
        make_tiny(preset, lambda *_: None)
    assert list(tmp_path.iterdir()) == []
