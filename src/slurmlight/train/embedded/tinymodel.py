"""The tiny policy's body: a Qwen3-shaped model of 0.41 M parameters and a tokenizer of its own, in Hugging Face format."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

VOCABULARY = 768
MAX_POSITIONS = 512
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # Qwen's names

# ChatML as Qwen has it, without the thinking part: enable_thinking is accepted and ignored.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The pre-tokenizer of Qwen2 (transformers, convert_slow_tokenizer.Qwen2Converter): single digits, words with their blank.
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def render(messages: Sequence[dict[str, str]]) -> str:
    """What CHAT_TEMPLATE gives with a generation prompt (a template engine a demonstration would cost more than training)."""
    turns = "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)
    return f"{turns}{START}assistant\n"


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY entries learned from ``texts`` (same texts, same merges)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = [AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, START, END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END_OF_TEXT, model_max_length=MAX_POSITIONS, padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Random weights from ``seed``; the global random state of torch is left as it was."""
    vocabulary = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,  # one is too few to copy values from the question reliably
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[END_OF_TEXT],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=vocabulary[END], pad_token_id=vocabulary[END_OF_TEXT])
    return model


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises OSError (disk full, no permission)."""
    folder.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # a bar for one file of 1.5 MB would tear up the caller's own
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
