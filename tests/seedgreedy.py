"""Does vLLM's CUDA wheel, on the CPU lane's platform, say what transformers says?  python -m tests.seedgreedy MODEL_FOLDER

Prints a JSON list of booleans, one a prompt: 24 greedy tokens after it are the same.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path


def main(model: str, scratch: str) -> None:
    from slurmlight.train.seed import cpu_lane

    own = cpu_lane.variables(Path(scratch), threads=1)
    os.environ |= own | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    sys.path[:0] = own["PYTHONPATH"].split(os.pathsep)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    from tests.trainbed import QUESTIONS

    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = LLM(model, dtype="float32", enforce_eager=True, max_model_len=128)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text * times}], add_generation_prompt=True)
        for text, times in zip(QUESTIONS, (1, 2, 3), strict=False)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    said = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    same = []
    for ids, one in zip(prompts, said, strict=True):
        whole = reference.generate(torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        same.append(whole[0][len(ids) :].tolist() == list(one.outputs[0].token_ids))
    print(json.dumps(same))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="sl-") as scratch:
        main(sys.argv[1], scratch)
