"""The payload of an evaluation: ask what is open, write the report.

    python -m slurmlight.evaluate.main EVAL_FOLDER

Exit codes: 0 every question answered, 3 all tried but some lost to infrastructure (listed apart; starting again asks them),
75 stopped on request, 2 bad input, 1 everything else, a server that died for instance (starting again goes on with the open
questions). What was answered is kept in each case. 0, 3 and a server that dies while it is asked leave a report of it; a stop
and a server that does not come up leave none. SIGUSR1 prints all stacks.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from slurmlight.errors import UserError
from slurmlight.evaluate import report, text
from slurmlight.evaluate.compare import check_other
from slurmlight.evaluate.config import EvalConfig, complete, read_config
from slurmlight.evaluate.judging import Judges
from slurmlight.evaluate.run import Harness
from slurmlight.evaluate.serve import Servers, serving
from slurmlight.evaluate.store import Store
from slurmlight.evaluate.subject import Subject, pin, questions
from slurmlight.runfolder import RunFolder, Status, StopRequest
from slurmlight.sql.execute import Limits
from slurmlight.tracking.names import SECONDS, STEP
from slurmlight.train.checkpoints import write_tracker
from slurmlight.train.engine import EXIT_BAD_CONFIG, EXIT_FINISHED, EXIT_STOPPED
from slurmlight.train.rollouts.children import ChildEnded

EXIT_PARTIAL = 3
EXIT_CRASHED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT
SAY_S = 10.0  # between two lines of progress in the log


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m slurmlight.evaluate.main EVAL_FOLDER", file=sys.stderr)
        return EXIT_BAD_CONFIG
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder = RunFolder(arguments[0])
    try:
        if folder.finished() and complete(folder.path):
            print(f"evaluation {folder.name} is finished: nothing to do", flush=True)
            return EXIT_FINISHED
        return Evaluation(folder, read_config(folder.path)).run()
    except Stopped:
        print("stopped on request before the first question", flush=True)
        return EXIT_STOPPED
    except (UserError, ChildEnded) as error:
        print(f"slurmlight: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, UserError) else EXIT_CRASHED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        print(
            f"slurmlight: {error}; make room, then start again: it goes on with the open questions", file=sys.stderr, flush=True
        )
        return EXIT_CRASHED
    except KeyboardInterrupt:
        print("slurmlight: interrupted; start again to go on with the open questions", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


class Stopped(Exception):
    """Asked to stop before the first question."""


class Evaluation:
    """One attempt. A step is an answered episode; it counts once it is on disk."""

    def __init__(self, folder: RunFolder, config: EvalConfig) -> None:
        self.folder, self.config = folder, config
        told = os.environ.get("SLURMLIGHT_ATTEMPT", "")
        self.attempt = int(told) if told.isdigit() else max(folder.attempt_numbers(), default=0) + 1
        self.logs = folder.attempt(self.attempt)
        self._row = self._said = time.monotonic()
        self._pace: float | None = None
        self._phase, self._beaten = "", 0.0

    def run(self) -> int:
        """Raises UserError, Stopped, OSError and ChildEnded, the last after a report where questions were asked."""
        self._listen()
        tasks = questions(self.config)
        self.total = len(tasks) * self.config.samples
        self.store = Store(self.folder.path, self.attempt)
        self._beat("load")
        subject = pin(self.folder.path, self.config, tasks, lambda: self._waiting("wait for a merge"))
        if self.config.against:
            check_other(self.config, subject, Path(self.config.against))
        judges = Judges(min(4, os.cpu_count() or 1), Limits(timeout_s=self.config.training().agent.query_timeout_s))
        if len(self.store.answers) == self.total:
            return self._report(subject, {})
        with serving(self.config, subject, self.logs, lambda: self._waiting("start server")) as servers, judges:
            harness = Harness(self.config, tasks, self.store, servers, judges, self._tick, self._saved)
            return self._ask(harness, servers, subject)

    def _ask(self, harness: Harness, servers: Servers, subject: Subject) -> int:
        done = self.total - len(harness.open())
        print(f"evaluating {subject.label}: {self.config.measure}, {done} of {self.total} episodes answered before", flush=True)
        self._row = self._said = time.monotonic()
        try:
            finished = asyncio.run(harness.run())
        except ChildEnded:
            report.write(self.folder.path, self.config, subject, harness.progress.failed)
            raise
        if not finished:
            print(f"stopped on request after {len(self.store.answers)} of {self.total} episodes, which are saved", flush=True)
            return EXIT_STOPPED
        return self._report(subject, harness.progress.failed)

    def _report(self, subject: Subject, failed: dict[tuple[int, int], str]) -> int:
        self._beat("report")
        summary = report.write(self.folder.path, self.config, subject, failed)
        print("\n".join(text.headline(summary)), flush=True)
        print(f"report: {self.folder.path / 'report/report.html'}", flush=True)
        self.folder.mark_finished(len(self.store.answers), self.attempt)
        if not summary["complete"]:
            print(
                f"partial: {summary['lost']} of {self.total} episodes were lost to infrastructure", file=sys.stderr, flush=True
            )
            return EXIT_PARTIAL
        return EXIT_FINISHED

    # progress

    def _saved(self, rows: int) -> None:
        now = time.monotonic()
        seconds, self._row = now - self._row, now
        done = len(self.store.answers)
        self._pace = seconds / rows if self._pace is None else 0.7 * self._pace + 0.3 * seconds / rows
        self.folder.add_metrics(
            {STEP: done, SECONDS: seconds, "eval/right": self._right("strict"), "eval/official": self._right("official")}
        )
        write_tracker(self.folder.path, done)
        self._beat("questions", always=True)
        if now - self._said > SAY_S:
            self._said = now
            left = self._pace * (self.total - done)
            print(
                f"{done}/{self.total} episodes, {self._right('strict'):.3f} right so far (strict), {left:.0f} s left",
                flush=True,
            )

    def _right(self, evaluator: str) -> float:
        scores = [score for one in self.store.answers.values() if (score := getattr(one, evaluator)) is not None]
        return sum(scores) / len(scores) if scores else 0.0

    def _tick(self) -> bool:
        """Whether to stop."""
        request = self.folder.stop_request()
        return request is not None and request.attempt >= self.attempt

    def _waiting(self, phase: str) -> None:
        self._beat(phase)
        if self._tick():
            raise Stopped

    def _beat(self, phase: str, always: bool = False) -> None:
        now = time.monotonic()
        if phase == self._phase and now - self._beaten < 1.0 and not always:
            return
        self._phase, self._beaten = phase, now
        done = len(self.store.answers)
        right = self._right("strict") if done else None
        self.folder.beat(
            Status(
                done, self.total, phase, self.attempt, time.time(), None, right, self._pace, os.getpid(), self.config.measure
            )
        )

    def _listen(self) -> None:
        request = self.folder.stop_request()
        if request is not None and request.attempt < self.attempt:
            self.folder.clear_stop()

        def ask(signum: int, _: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.folder.request_stop(StopRequest(signal.Signals(signum).name, self.attempt))

        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, ask)


if __name__ == "__main__":
    sys.exit(main())
