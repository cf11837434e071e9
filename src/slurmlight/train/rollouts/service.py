"""Gateway and runner pool together, for one attempt of any engine.

with RolloutService(run.folder.path, preset, logs) as service:   # service.url, service.key, service.check()
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from slurmlight.presets import Preset
from slurmlight.train.rollouts.gateway import Gateway
from slurmlight.train.rollouts.pool import RunnerPool
from slurmlight.train.rollouts.runner import SQL_PLAYER


class RolloutService:
    """Raises on entry what Gateway raises. Enter it in the main thread: children are tied to the thread that starts them.

    ``logs`` is the attempt's folder: gateway.log and runner-N.log go there.
    """

    def __init__(self, run: Path, preset: Preset, logs: Path, player: str = SQL_PLAYER, port: int | None = None) -> None:
        settings = preset.actor_rollout_ref
        self.gateway = Gateway(logs, settings.model.path, settings.rollout.temperature, port)
        self.pool = RunnerPool(self.gateway, run, preset.runner, logs, player)

    def __enter__(self) -> RolloutService:
        with ExitStack() as stack:
            stack.enter_context(self.gateway)
            stack.enter_context(self.pool)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def key(self) -> str:
        return self.gateway.key

    def check(self) -> None:
        """Call often: replaces dead runners and fails what they had. Raises ChildEnded where the attempt cannot go on."""
        self.gateway.check()
        self.pool.check()
