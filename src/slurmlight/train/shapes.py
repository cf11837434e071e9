"""Models of a published shape with random weights: they cost the same per token as the real ones and know nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slurmlight.errors import UserError, unknown_name
from slurmlight.train.modelfolder import refuse_other, save

# config.json of the model cards; every one has tied embeddings.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
    },
    "qwen3-tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 640,
        "max_position_embeddings": 2048,
        "rope_theta": 1e4,
    },
}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def random_model(like: str, folder: Path, device: str = "cpu", seed: int = 0, tokenizer_of: Path | None = None) -> int:
    """Write a bf16 model of the shape ``like`` with random weights; its number of parameters.

    The tokenizer is that of the model folder ``tokenizer_of`` (prompts get their real length) or spells bytes. Raises UserError
    for an unknown shape, a device that is not here, a tokenizer that cannot be read or has more entries than the shape, and
    where ``folder`` cannot be written or holds something else.
    """
    if like not in SHAPES:
        raise unknown_name("shape", like, SHAPES)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _check_device(device)
    tokenizer: Any = _tokenizer(tokenizer_of) if tokenizer_of else byte_tokenizer()
    refuse_other(folder)
    if len(tokenizer) > SHAPES[like]["vocab_size"]:
        raise UserError(f"the tokenizer of {tokenizer_of} has {len(tokenizer)} entries, {like} has fewer", "take another")
    config = Qwen3Config(
        **SHAPES[like], tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, dtype="bfloat16"
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(config)
        model = model.to(torch.bfloat16)
    save(model, tokenizer, folder)
    return sum(weight.numel() for weight in model.parameters())


def _check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device).cpu()  # "meta" can be made but never saved
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        why = str(error).partition("\n")[0]
        raise UserError(f"--device {device} cannot be used here ({why})", "take cpu, or cuda where there is a GPU") from None


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not os.path.isdir(folder):  # transformers would look for a model of that name in its cache
        raise UserError(f"--tokenizer {folder} is not a folder", "give a model folder, or leave it out for bytes")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises what its parts raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"the tokenizer of {folder} cannot be read ({why})", "give a whole model folder") from error


def byte_tokenizer() -> Any:
    """256 bytes and three marks: every text has a spelling, at one token a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    return fast
