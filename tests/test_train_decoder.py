"""The tiny decoder: right by transformers' own forward pass, and the same bits for a row whoever shares the batch."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from slurmlight.errors import UserError
from slurmlight.train.embedded.actor import load_model
from slurmlight.train.embedded.batcher import Batcher, Completion, Replaced, Request
from slurmlight.train.embedded.decoder import Decoder, length_class, load_weights, read_shape
from slurmlight.train.embedded.sampling import choose, uniform
from slurmlight.train.embedded.tokens import ChatTokens
from tests.trainbed import write_model

PLACES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen3ForCausalLM:
    return load_model(folder).eval()


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    shape = read_shape(folder)
    return Decoder(shape, load_weights(folder, shape), max_length=400)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(300) for _ in range(length)] for length in lengths]


def complete(decoder: Decoder, requests: Sequence[Request], arrival: Sequence[int], rng: random.Random) -> list[Completion]:
    """Serve ``requests`` in the order ``arrival``, with random pauses in between; the completions in order of ``requests``."""

    async def late(batcher: Batcher, request: Request, rounds: int) -> Completion:
        for _ in range(rounds):
            await asyncio.sleep(0)
        return await batcher.generate(request)

    async def serve() -> list[Completion]:
        batcher = Batcher(decoder, PLACES, frozenset({7}))
        running = asyncio.create_task(batcher.run())
        tasks = {index: asyncio.create_task(late(batcher, requests[index], rng.randrange(12))) for index in arrival}
        done = [await tasks[index] for index in range(len(requests))]
        running.cancel()
        return done

    return asyncio.run(serve())


def test_greedy_tokens_and_logprobs_are_those_of_transformers(decoder: Decoder, model: Qwen3ForCausalLM) -> None:
    requests = [Request(prompt, 12, 0.0, 0) for prompt in prompts(5, 60, 127, 128, 129, 300)]
    served = complete(decoder, requests, range(len(requests)), random.Random(0))
    for request, done in zip(requests, served, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt + done.tokens])).logits[0, len(request.prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)
        assert done.tokens == wanted.argmax(-1).tolist()
        assert done.logprobs == pytest.approx(wanted.max(-1).values.tolist(), abs=1e-5)


def test_sampled_logprobs_are_those_of_the_distribution_sampled_from(decoder: Decoder, model: Qwen3ForCausalLM) -> None:
    (prompt,) = prompts(40)
    (done,) = complete(decoder, [Request(prompt, 20, 0.7, 5)], [0], random.Random(0))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + done.tokens])).logits[0, len(prompt) - 1 : -1] / 0.7
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
    assert done.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_row_has_the_same_bits_in_any_company_and_any_order_of_arrival(decoder: Decoder) -> None:
    texts = prompts(9, 33, 57, 57, 90, 118, 125, 140, 200)
    requests = [Request(prompt, 10, 1.0, seed) for seed, prompt in enumerate(texts * 3)]
    alone = [complete(decoder, [request], [0], random.Random(0))[0] for request in requests]
    for seed in range(4):
        rng = random.Random(seed)
        chosen = rng.sample(range(len(requests)), rng.randint(2, len(requests)))  # other companions each time
        served = complete(decoder, [requests[index] for index in chosen], rng.sample(range(len(chosen)), len(chosen)), rng)
        assert served == [alone[index] for index in chosen]


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_rows_logits_have_the_same_bits_at_every_place_among_any_strangers(decoder: Decoder, rows: int) -> None:
    (prompt,) = prompts(50)
    prefilled, _ = decoder.prefill(prompt)
    alone = decoder.new_cache(1, length_class(64))
    for layer, row in zip(alone, prefilled, strict=True):
        layer[0, :, :50] = row
    wanted = decoder.step(alone, [11], [50])[0].tobytes()
    rng = np.random.default_rng(0)
    for place in range(rows):
        cache = decoder.new_cache(rows, length_class(64))
        for layer, row in zip(cache, prefilled, strict=True):
            layer[:] = rng.standard_normal(layer.shape)  # strangers elsewhere, and what they left behind in our row
            layer[place, :, :50] = row
        tokens, positions = rng.integers(0, 300, rows).tolist(), rng.integers(1, 100, rows).tolist()
        tokens[place], positions[place] = 11, 50
        assert decoder.step(cache, tokens, positions)[place].tobytes() == wanted


def test_new_weights_give_up_what_is_under_way(decoder: Decoder) -> None:
    async def serve() -> None:
        batcher = Batcher(decoder, PLACES, frozenset())
        running = asyncio.create_task(batcher.run())
        task = asyncio.create_task(batcher.generate(Request(prompts(9)[0], 100, 1.0, 0)))
        for _ in range(5):
            await asyncio.sleep(0)
        batcher.replace(decoder.weights)
        with pytest.raises(Replaced):
            await task
        assert len((await batcher.generate(Request(prompts(9)[0], 3, 1.0, 0))).tokens) == 3
        running.cancel()

    asyncio.run(serve())


def test_sampling_follows_the_distribution_and_only_seed_and_position() -> None:
    logits = np.array([0.0, 1.0, 2.0, -np.inf], np.float32)
    wanted = torch.tensor(logits).softmax(-1)
    counts = torch.zeros(4)
    for seed in range(60):
        for position in range(50):
            counts[choose(logits, 1.0, seed, position)[0]] += 1
    assert counts[3] == 0
    deviation = (counts / 3000 - wanted).abs()
    assert (deviation < 4 * (wanted * (1 - wanted) / 3000).sqrt() + 1e-9).all()
    assert choose(logits, 1.0, 3, 4) == choose(logits, 1.0, 3, 4)


def test_neighbouring_seeds_and_positions_share_no_stream() -> None:
    grid = [[uniform(seed, position) for position in range(64)] for seed in range(64)]
    flat = torch.tensor(grid, dtype=torch.float64)
    assert len({value for row in grid for value in row}) == 64 * 64
    for other in (flat.roll(1, 0), flat.roll(1, 1), flat.roll((1, -1), (0, 1))):
        correlation = torch.corrcoef(torch.stack([flat.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.07  # 4.5 standard errors of 4096 pairs


@pytest.mark.parametrize(
    "change", [{"attention_bias": True}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {"model_type": "llama"}]
)
def test_a_variant_the_decoder_does_not_compute_is_refused(folder: Path, tmp_path: Path, change: dict) -> None:
    config = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no plain Qwen3"):
        read_shape(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"x" * 1000, "half"])
def test_a_folder_without_whole_weights_is_refused(folder: Path, tmp_path: Path, content: bytes | str | None) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    with pytest.raises(UserError, match="no whole Qwen3 model"):
        load_weights(tmp_path, read_shape(folder))
    with pytest.raises(UserError, match="no whole Qwen3 model"):
        load_model(tmp_path)


def test_messages_become_the_tokens_that_transformers_makes_of_them(folder: Path) -> None:
    tokenizer, ours = AutoTokenizer.from_pretrained(folder), ChatTokens(folder)
    messages = [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "How many caf\u00e9s <|im_end|> are old? 17 \U0001f408"},
        {"role": "assistant", "content": "SELECT 1;"},
        {"role": "user", "content": "again"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    wanted = tokenizer(text, add_special_tokens=False).input_ids
    assert ours.encode(messages, {"enable_thinking": False}) == wanted
    assert ours.decode(wanted) == tokenizer.decode(wanted, skip_special_tokens=True)
    assert ours.end_tokens == {tokenizer.eos_token_id}
