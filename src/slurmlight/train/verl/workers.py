"""What every Ray worker process of a run does first: Agent-Lightning's losses and shims, quick log-probabilities."""

# pyright: reportMissingImports=false

from __future__ import annotations


def setup() -> None:
    """Named as Ray's ``worker_process_setup_hook``. verl itself imports the plug-in of ``VERL_USE_EXTERNAL_MODULES``."""
    from agentlightning.verl.per_rollout_loss import register_in_worker

    from slurmlight.train.verl import logprobs

    register_in_worker()
    logprobs.install()
