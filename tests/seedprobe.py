"""The seed stack's FSDP worker, watched: are the weights that vLLM samples with the trainer's? And faults on request.

RUN/weights.jsonl gets a line for each hand-over of weights; the run's folder is in SEEDBED_RUN. While RUN/worker-fault exists,
the vLLM side raises in the method that it names.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from slurmlight.files import append_line
from slurmlight.train.seed.worker import SeedWorker

_MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class ProbedWorker(SeedWorker):
    def _build_rollout(self, trust_remote_code: bool = False) -> Any:
        rollout, manager = super()._build_rollout(trust_remote_code)
        run, wake_up, execute = Path(os.environ["SEEDBED_RUN"]), rollout.wake_up, rollout.execute_method

        def woken(*args: Any, **kwargs: Any) -> None:
            asleep = rollout.is_sleep
            wake_up(*args, **kwargs)
            if asleep:
                model = rollout.inference_engine.worker.model_runner.model
                append_line(
                    run / "weights.jsonl", json.dumps(compare(manager.module.state_dict(), dict(model.named_parameters())))
                )

        def executed(method: Any, *args: Any, **kwargs: Any) -> Any:
            fault = run / "worker-fault"
            if fault.exists() and method == fault.read_text():
                raise RuntimeError("no cats in this worker")
            return execute(method, *args, **kwargs)

        rollout.wake_up, rollout.execute_method = woken, executed
        return rollout, manager


def compare(trained: dict[str, Any], sampled: dict[str, Any]) -> dict[str, Any]:
    """The largest difference of any tensor, how many were compared, and a number that moves with training."""
    worst, total = 0.0, 0.0
    for name, weight in sampled.items():
        kind = next((kind for kind in _MERGED if kind in name), None)
        parts = [name.replace(kind, part) for part in _MERGED[kind]] if kind else [name]
        ours = torch.cat([trained[part].float() for part in parts])
        theirs = weight.detach()[: len(ours)].float()  # vLLM pads the vocabulary
        worst = max(worst, (ours - theirs).abs().max().item())
        total += theirs.double().abs().sum().item()
    return {"difference": worst, "tensors": len(sampled), "sum": total}
