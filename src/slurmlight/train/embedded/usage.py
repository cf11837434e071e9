"""Where the CPU goes while episodes are played: seconds of the policy server, the gateway and the runners."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from slurmlight.train.embedded.policy import PolicyServer
from slurmlight.train.rollouts.service import RolloutService


class Usage:
    def __init__(self, policy: PolicyServer, service: RolloutService) -> None:
        self.policy = policy
        self.service = service

    @contextmanager
    def measured(self, row: dict[str, Any]) -> Iterator[None]:
        """Adds CPU seconds to ``row``: cpu_s/policy_server (cpu_s/generation is a part of it), /gateway, /runners, /trainer."""
        before = self._now()
        yield
        row |= {name: max(0.0, value - before[name]) for name, value in self._now().items()}

    def _now(self) -> dict[str, float]:
        return {
            "cpu_s/trainer": time.process_time(),
            "cpu_s/policy_server": _cpu_seconds(self.policy.child.process.pid),
            "cpu_s/gateway": _cpu_seconds(self.service.gateway.child.process.pid),
            "cpu_s/runners": sum(_cpu_seconds(runner.process.pid) for runner in self.service.pool.runners),
            "cpu_s/generation": self.policy.generation_cpu_seconds(),
        }


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
