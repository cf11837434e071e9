"""What a Ray worker of a run does first: Agent-Lightning's losses and shims, quick functions of logits.

verl imports this module in every process (``VERL_USE_EXTERNAL_MODULES``), in a worker that is when its actor's class is loaded.
Ray's ``worker_process_setup_hook``, Agent-Lightning's own way, comes too early: to import verl is to look for GPUs, and Ray has
not yet said which one is the worker's. With two GPUs both ranks then took the first one.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import ray


def setup() -> None:
    from agentlightning.verl.per_rollout_loss import register_in_worker

    from slurmlight.train.verl import logits

    register_in_worker()
    logits.install()


def _in_worker() -> bool:
    """Not in the trainer, nor in vLLM's own processes, which import verl too."""
    return ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE


if _in_worker():
    setup()
