"""Runners of Agent-Lightning 0.3 that cannot die unnoticed nor outlive the trainer: a nurse process forks and replaces them.

Agent-Lightning forks them once from the trainer and never looks again. The nurse is forked before the trainer has threads,
so that it may fork at any time; nurse and runners end with their parent, whatever ends it (prctl, see rollouts/leash.py).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import os
import select
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from agentlightning.execution.client_server import ClientServerExecutionStrategy

from slurmlight.train.rollouts.children import ChildEnded
from slurmlight.train.seed.hooks import Death
from slurmlight.train.seed.leash import leash

DEATHS_IN_A_ROW = 3  # a runner, without an episode ended in between: then replacing them is no cure
_END_S = 5.0


class Closing:
    """Agent-Lightning's stop event for one family of processes, as a pipe: a process killed while it looks locks nobody out."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def set(self) -> None:
        os.write(self._write, b".")

    def is_set(self) -> bool:
        return bool(select.select([self._read], [], [], 0)[0])


class NursedRunners(ClientServerExecutionStrategy):
    """``n_runners`` runners with a log each under ``logs``, and the store's server at ``port`` of the loopback interface."""

    def __init__(self, n_runners: int, port: int, logs: Path) -> None:
        super().__init__(role="both", server_host="127.0.0.1", server_port=port, n_runners=n_runners, graceful_timeout=_END_S)
        self.logs = logs
        self.nurse: Any = None
        self._deaths = 0

    def check(self) -> list[Death]:
        """Call often: the runners that died and were replaced since. Raises ChildEnded where the attempt cannot go on."""
        if self.nurse is None or not self.nurse.is_alive():
            code = self.nurse and self.nurse.exitcode
            raise ChildEnded(f"the nurse of the runners {_how(code)}; start the run again, it resumes from its last checkpoint")
        found = []
        with contextlib.suppress(EOFError):  # the nurse is gone: the next call says so
            while self._told.poll():
                found.append(self._told.recv())
        self._deaths += len(found)
        for death in found:
            print(f"{death.worker} {death.how}; its episode is failed and it is replaced", file=sys.stderr, flush=True)
        if self._deaths > DEATHS_IN_A_ROW * self.n_runners:
            raise ChildEnded(
                f"{self._deaths} runners died without ending an episode, the last: {found[-1].worker} {found[-1].how}; see "
                f"{self.logs}/runner-*.log, mend the cause and start the run again, it resumes from its last checkpoint"
            )
        return found

    def episode_ended(self) -> None:
        """An episode ended that no death ended: the runners work."""
        self._deaths = 0

    # what Agent-Lightning's strategy calls

    def _spawn_runners(self, runner: Any, store: Any, stop_evt: Any, *, ctx: Any) -> list[Any]:
        self._closing = Closing()
        self._told, telling = mp.Pipe(duplex=False)
        self.nurse = ctx.Process(target=self._tend, args=(runner, store, telling), name="nurse")
        self.nurse.start()
        telling.close()
        return [self.nurse]

    def _shutdown_processes(self, processes: Any, stop_evt: Any) -> None:
        if self.nurse is not None:
            self._closing.set()
        super()._shutdown_processes(processes, stop_evt)

    # in the nurse

    def _tend(self, runner: Any, store: Any, telling: Connection) -> None:
        os.setsid()  # Ctrl-C is the trainer's to handle
        leash()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        count = self.n_runners
        runners = {worker: self._fork(runner, store, worker) for worker in range(count)}
        while not self._closing.is_set():
            wait([process.sentinel for process in runners.values()], timeout=0.2)
            for worker in [worker for worker, process in runners.items() if not process.is_alive()]:
                process = runners.pop(worker)
                if self._closing.is_set():
                    break
                telling.send(Death(f"Worker-{worker}", _how(process.exitcode)))
                runners[count] = self._fork(runner, store, count)
                count += 1
        deadline = time.monotonic() + _END_S / 2
        for process in runners.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()

    def _fork(self, runner: Any, store: Any, worker: int) -> Any:
        process = mp.get_context("fork").Process(target=self._be_runner, args=(runner, store, worker), name=f"runner-{worker}")
        process.start()
        return process

    def _be_runner(self, runner: Any, store: Any, worker: int) -> None:
        leash()
        log = os.open(self.logs / f"runner-{worker % self.n_runners + 1}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        asyncio.run(self._execute_runner(runner, worker, store, self._closing))  # pyright: ignore[reportArgumentType]


def _how(code: int | None) -> str:
    if code is None:
        return "was never started"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
