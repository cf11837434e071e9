"""The supervisor of a run: starts the payload, watches it, stops it in time, and brings the job back until it is finished.

Run: python -m slurmlight.cluster.supervisor RUN_FOLDER     (what every job does, under Slurm and on this machine)
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from slurmlight import plan as plans
from slurmlight.cluster import attempts, ends, guard, outcome, ports, preflight, processes
from slurmlight.cluster.attempts import Attempt, Log
from slurmlight.cluster.decide import PEOPLE, Decision, End, decide
from slurmlight.cluster.ends import BAD_CONFIG, STOPPED
from slurmlight.cluster.outcome import FAILED
from slurmlight.cluster.payload import Payload, remove_temp
from slurmlight.cluster.place import PREEMPTION, Place, Warning, here, job_here
from slurmlight.errors import UserError
from slurmlight.files import read_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder

TICK_S = 1.0
SECURE_S = 20.0  # so long before the time to save is over the requeue is asked for, saved or not
AGAIN_S = 0.5  # two Ctrl-C closer than this are one (terminal and launcher both pass it on)
ORPHANED = Warning("batch process killed", SECURE_S + 20.0, coming_back=True)
TERM_WAIT_S = 20.0  # for the TERM that follows a requeue
NODE_LOST_S = 5.0  # for a payload to say what it saw of the loss (it cannot save, its collectives hang), or the other way round
RETRY_S = 1.0  # between attempts on this machine


def supervise(folder: Path | str) -> int:
    """Run the job of a run folder to its end here. Returns the exit code; 0 only where the run is finished.

    2: cannot run as it is; 75: stopped or requeued; 1: left to a person (outcome.json says why); 130: ended at once.
    """
    run = RunFolder(folder)
    try:
        plan = _plan(run)
        if run.finished():
            print(f"run {run.name} is finished: nothing to do", flush=True)
            return 0
        job = job_here(plan.cluster, os.environ)
        with guard.own(run, job):
            return guard.guard(lambda: Supervisor(run, plan, job).run(), lambda how: outcome.give_up(run, job, how))
    except OSError as error:
        return _unwritable(run, error)
    except UserError as error:
        print(f"slurmlight: {error}", file=sys.stderr, flush=True)
        return error.exit_code


class Supervisor:
    """One life of the supervisor: one attempt under Slurm, as many as it takes on this machine."""

    def __init__(self, run: RunFolder, plan: JobPlan, job: str) -> None:
        self.run_folder, self.plan = run, plan
        self.place: Place = here(job, plan, os.environ)
        self.guard = os.getppid()
        self.warning: Warning | None = None
        self.secure_at: float | None = None
        self.interrupted: float | None = None
        self.at_once = False

    def run(self) -> int:
        try:
            while True:
                decision, end, log = self._attempt()
                if decision.verdict != "requeue":
                    ports.forget(self.place.job, ports.root(self.plan.scratch))
                    return outcome.write(self.run_folder, decision, end, at_once=self.at_once)
                if not self.place.local:
                    return self._requeue(end, log)
                if not self._sleep(RETRY_S):
                    ports.forget(self.place.job, ports.root(self.plan.scratch))
                    why = f"stopped on request ({self.warning.reason})" if self.warning else ""
                    return outcome.write(self.run_folder, Decision("stop", why), replace(end, stop_reason="interrupt"))
        except OSError as error:
            return _unwritable(self.run_folder, error)
        finally:
            self.place.close()

    def _attempt(self) -> tuple[Decision, End, Log]:
        run = self.run_folder
        history = self._history()
        run.clear_stop()
        outcome.path(run).unlink(missing_ok=True)
        attempt, log = attempts.begin(
            run, job=self.place.job, node=self.place.node, restarts=self.place.restarts, mark=uuid.uuid4().hex
        )
        log.line(f"run {run.name}, job {self.place.job} on {self.place.node}, {time.strftime('%F %T %z')}")
        self._end_orphans(history, log)
        end, phases = self._start(attempt, log)
        attempt = attempts.close(run, attempt, phases=phases, **ends.fields(end))
        end = ends.with_steps(attempt, end)
        mine = [ends.with_steps(earlier) for earlier in history if earlier.job == self.place.job]
        decision = decide(
            end,
            mine,
            restarts=max(self.place.restarts, len(mine)),
            cap=self.plan.requeue_cap,
            requeue=self.plan.requeue,
        )
        with suppress(OSError):  # a full disk, most likely: what the payload saved counts, the next attempt closes the record
            attempts.save(run, replace(attempt, reason=decision.why))
        log.phase("end", f"{decision.why}; {decision.verdict}" + (f"; {decision.action}" if decision.action else ""))
        return decision, end, log

    def _history(self) -> list[Attempt]:
        known = attempts.load(self.run_folder)
        closed = attempts.close_lost(self.run_folder, known)
        for before, after in zip(known, closed, strict=True):
            if before != after:
                attempts.save(self.run_folder, after)
        return closed

    def _end_orphans(self, history: list[Attempt], log: Log) -> None:
        if orphans := processes.marked(attempt.mark for attempt in history):
            log.phase("orphans", f"ending processes of earlier attempts: {' '.join(map(str, orphans))}")
            processes.end(orphans)
        for attempt in history:
            remove_temp(self.plan, attempt)

    def _start(self, attempt: Attempt, log: Log) -> tuple[End, dict[str, float]]:
        log.phase("preflight")
        try:
            preflight.run(self.plan, self.run_folder)
            payload = Payload(self.run_folder, self.plan, attempt, log, os.environ)
        except preflight.BadNode as error:
            return End("bad node", cause=error.what, action=error.mend), {}
        except UserError as error:
            return End("bad config", cause=error.what, action=error.mend), {}
        except OSError as error:
            return End("bad node", cause=f"{self.plan.payload[0]} cannot be started: {error.strerror}"), {}
        try:
            hung = self._watch(payload, log)
        finally:
            payload.look()  # the last beats
            payload.end(grace=0)
        code = payload.exit_code or 0
        log.phase("ended", f"exit code {code}")
        asked = self.run_folder.stop_request()  # also one by `slurmlight cancel`
        reason = self.warning.reason if self.warning else asked.reason if asked and not hung else ""
        end = ends.judge(self.run_folder, self.plan, log, code=code, hung=hung, stop_reason=reason, nodes=self.place.nodes)
        end = ends.wait_for_space(self.run_folder, end, log, self._sleep)
        return end, {name: round(seconds, 1) for name, seconds in payload.watchdog.phases.items()}

    def _watch(self, payload: Payload, log: Log) -> str:
        """Until the payload has ended. Returns how it hung, if it did."""
        self.secure_at = None
        if self.warning:  # it came between two attempts
            self._take(self.warning, payload, log)
        while payload.exit_code is None:
            event = signal.sigtimedwait(guard.SIGNALS | {signal.SIGCHLD}, TICK_S)
            if event and event.si_signo != signal.SIGCHLD:
                self._hear(event.si_signo, payload, log)
            elif found := self.place.look():
                self._take(found, payload, log)
            if self.at_once:
                log.phase("interrupt", "ending at once")
                return ""
            if self.secure_at and time.monotonic() > self.secure_at:
                self._time_is_up(log)
            if lost := payload.lost():
                log.phase("lost", lost)
                payload.end(grace=NODE_LOST_S)
                if not self.warning:
                    self.run_folder.clear_stop()  # the payload took the signal for a request
                return ""
            if hung := payload.look():
                log.phase("hang", hung)
                payload.end_hung()
                return hung
        if payload.exit_code and (lost := payload.lost(NODE_LOST_S)):  # the payload may see it first
            log.phase("lost", lost)
        return ""

    def _hear(self, signum: int, payload: Payload, log: Log) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT and self.interrupted and now - self.interrupted > AGAIN_S:
            self.at_once = True
        self.interrupted = self.interrupted or now
        warning = ORPHANED if self._orphaned else self.place.on_signal(signum)
        asked = self.run_folder.stop_request()
        if asked and asked.reason in PEOPLE:  # `slurmlight cancel` says so before it sends a signal
            warning = replace(warning, reason=asked.reason)
        self._take(warning, payload, log)

    def _take(self, warning: Warning, payload: Payload, log: Log) -> None:
        """Pass a warning on to the payload. A later one may shorten the time, or turn out to be a cancellation."""
        first = self.warning
        if first is None or first is warning or (warning.reason in PEOPLE and first.reason not in PEOPLE):
            left = "" if warning.seconds is None else f", {warning.seconds:.0f} s to save"
            log.phase("stop", f"{warning.reason}{left}")
            payload.ask_to_stop(warning.reason)
            self.warning = warning
        elif warning.coming_back:
            self.warning = replace(first, coming_back=True)
        if warning.seconds is not None and warning.reason != PREEMPTION:  # after a preemption Slurm requeues by itself
            at = time.monotonic() + max(0.0, warning.seconds - SECURE_S)
            self.secure_at = min(at, self.secure_at or at)

    @property
    def _orphaned(self) -> bool:
        """The batch process was killed. Where Slurm lets its child live on, the job may come back meanwhile."""
        return not self.place.local and os.getppid() != self.guard

    def _time_is_up(self, log: Log) -> None:
        """The payload still saves: coming back goes first, saving goes on until Slurm's kill."""
        self.secure_at = None
        assert self.warning
        if self._orphaned:
            self.at_once = True
        elif self.plan.requeue and not self.warning.coming_back and self.warning.reason not in PEOPLE:
            log.phase("requeue", "the payload has not saved yet")
            if self.place.requeue(log.line):
                self.warning = replace(self.warning, coming_back=True)

    def _sleep(self, seconds: float) -> bool:
        """False where a signal ended the wait: it is then the job's warning."""
        event = signal.sigtimedwait(guard.SIGNALS, seconds)
        if event:
            self.warning = self.place.on_signal(event.si_signo)
        return event is None

    def _requeue(self, end: End, log: Log) -> int:
        """Under Slurm: have the job come back. TERM follows at once; exiting before it would end the job instead."""
        if self.warning and self.warning.coming_back:
            return STOPPED
        log.phase("requeue")
        if not self.place.requeue(log.line):
            ports.forget(self.place.job, ports.root(self.plan.scratch))
            return outcome.write(
                self.run_folder, Decision("stop", "Slurm did not requeue the job", "launch the same run again"), end
            )
        if end.kind == "bad node":
            self.place.avoid_node(log.line)
        signal.sigtimedwait({signal.SIGTERM}, TERM_WAIT_S)
        return STOPPED


def _unwritable(run: RunFolder, error: OSError) -> int:
    """Records cannot be written: nothing would be known of what follows."""
    mend = "make room there or see who owns it, then launch again"
    print(f"slurmlight: run folder {run.path}: {error}; {mend}", file=sys.stderr, flush=True)
    return FAILED


def _plan(run: RunFolder) -> JobPlan:
    value = read_json(run.plan)
    if not isinstance(value, dict):
        raise UserError(f"{run.plan} is missing or torn", "launch the run again")
    return plans.from_json(value)


def main() -> int:
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        print(f"usage: python -m slurmlight.cluster.supervisor RUN_FOLDER (not {' '.join(sys.argv[1:])!r})", file=sys.stderr)
        return BAD_CONFIG
    return supervise(sys.argv[1])


if __name__ == "__main__":
    raise SystemExit(main())
