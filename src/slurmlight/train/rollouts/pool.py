"""The pool of warm runners: started once, watched, replaced when they die. No episode waits for a runner that is gone, nor
for one that has lost it (a claim's answer or an episode's end that did not arrive)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from slurmlight.presets.schema import RunnerSection
from slurmlight.train.rollouts.children import Child, ChildEnded
from slurmlight.train.rollouts.gateway import KEY_NAME, Gateway
from slurmlight.train.rollouts.runner import LOST, SQL_PLAYER

_LOOK_S = 5.0
_GRACE_S = 30.0  # beyond an episode's time-out, which its runner enforces
_DEATHS_IN_A_ROW = 3  # per place, without an episode ended in between: then replacing them is no cure


class RunnerPool:
    """``with RunnerPool(...) as pool``: ``runner.processes`` processes that share ``runner.n_runners`` episodes in flight.

    Call ``check`` often, from the thread that entered the pool (it is the one their leash is tied to).
    """

    def __init__(self, gateway: Gateway, run: Path, runner: RunnerSection, logs: Path, player: str = SQL_PLAYER) -> None:
        self.gateway = gateway
        self.run = run
        self.player = player
        self.logs = logs
        self.overdue_s = runner.rollout_timeout_s + _GRACE_S
        self.looked = 0.0
        count = min(runner.processes, runner.n_runners)
        self.slots = [runner.n_runners // count + (place < runner.n_runners % count) for place in range(count)]
        self.runners: list[Child] = []
        self.started = 0
        self.replaced = 0  # deaths since the last episode ended

    def __enter__(self) -> RunnerPool:
        self.runners = [self._start(place) for place in range(len(self.slots))]
        return self

    def __exit__(self, *_: object) -> None:
        for runner in self.runners:
            runner.process.terminate()
        for runner in self.runners:
            runner.stop()

    def check(self) -> None:
        """Replace runners that died and fail the rollouts they had, and those that run for too long. Raises ChildEnded where
        runners die again and again."""
        if time.monotonic() - self.looked > _LOOK_S:
            self._fail_overdue()
            self.looked = time.monotonic()
        for place, runner in enumerate(self.runners):
            if runner.alive:
                continue
            ending = runner.ending()
            print(f"{ending}; its episodes are failed and it is replaced", file=sys.stderr, flush=True)
            self._fail_rollouts_of(runner.name, ending)
            self.replaced += 1
            if self.replaced > _DEATHS_IN_A_ROW * len(self.slots):
                raise ChildEnded(
                    f"{self.replaced} runners died without ending an episode; {ending}; see {runner.log}, mend the cause "
                    "and start the run again, it resumes from its last checkpoint"
                )
            self.runners[place] = self._start(place)

    def episode_ended(self) -> None:
        """The owner saw a rollout end that no death ended: the runners work."""
        self.replaced = 0

    def _start(self, place: int) -> Child:
        self.started += 1
        name = f"runner-{self.started}"
        command = [
            *(sys.executable, "-m", "slurmlight.train.rollouts.runner"),
            *("--server", self.gateway.url, "--run", str(self.run), "--player", self.player),
            *("--name", name, "--slots", str(self.slots[place])),
        ]
        return Child(name, command, self.logs / f"runner-{place + 1}.log", {KEY_NAME: self.gateway.key})

    def _fail_overdue(self) -> None:
        for rollout in self.gateway.api.running():
            if time.time() - rollout["status"]["updated_at"] > self.overdue_s:
                self.gateway.api.fail(rollout["rollout_id"], f"{LOST}: no answer long after the time-out")

    def _fail_rollouts_of(self, name: str, why: str) -> None:
        for rollout in self.gateway.api.running():
            if rollout["status"]["k8s_job_name"] == name:
                self.gateway.api.fail(rollout["rollout_id"], f"{LOST}: {why}")
