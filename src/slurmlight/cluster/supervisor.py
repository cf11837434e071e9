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
from slurmlight.cluster import attempts, diagnosis, guard, preflight, processes
from slurmlight.cluster.attempts import Attempt, Log
from slurmlight.cluster.decide import PEOPLE, Decision, End, Kind, decide
from slurmlight.cluster.payload import Payload
from slurmlight.cluster.place import PREEMPTION, Place, Warning, here, job_here
from slurmlight.errors import UserError
from slurmlight.files import read_json, write_json
from slurmlight.plan import JobPlan
from slurmlight.runfolder import RunFolder

TICK_S = 1.0
FAILED, BAD_CONFIG, STOPPED, INTERRUPTED = 1, 2, 75, 130  # 75: sysexits.h EX_TEMPFAIL, also the payload's "saved, go on later"
BARREN_DEATHS = 3  # supervisors killed in a row without a step in between
SECURE_S = 20.0  # so long before the time to save is over the requeue is asked for, saved or not
AGAIN_S = 0.5  # two Ctrl-C closer than this are one (terminal and launcher both pass it on)
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
            return guard.guard(lambda: Supervisor(run, plan, job).run(), lambda how: _give_up(run, job, how))
    except UserError as error:
        print(f"slurmlight: {error}", file=sys.stderr, flush=True)
        return error.exit_code


class Supervisor:
    """One life of the supervisor: one attempt under Slurm, as many as it takes on this machine."""

    def __init__(self, run: RunFolder, plan: JobPlan, job: str) -> None:
        self.run_folder, self.plan = run, plan
        self.place: Place = here(job, plan.signal_lead_s, os.environ)
        self.warning: Warning | None = None
        self.secure_at: float | None = None
        self.interrupted: float | None = None
        self.at_once = False

    def run(self) -> int:
        try:
            while True:
                decision, end, log = self._attempt()
                if decision.verdict != "requeue":
                    return self._leave(decision, end)
                if not self.place.local:
                    return self._requeue(end, log)
                time.sleep(RETRY_S)
        except OSError as error:  # records cannot be written: nothing would be known of what follows
            print(
                f"slurmlight: run folder {self.run_folder.path}: {error}; free space there, then launch again", file=sys.stderr
            )
            return FAILED
        finally:
            self.place.close()

    def _attempt(self) -> tuple[Decision, End, Log]:
        run = self.run_folder
        history = self._history()
        run.clear_stop()
        outcome_path(run).unlink(missing_ok=True)
        attempt, log = attempts.begin(
            run, job=self.place.job, node=self.place.node, restarts=self.place.restarts, mark=uuid.uuid4().hex
        )
        log.line(f"run {run.name}, job {self.place.job} on {self.place.node}, {time.strftime('%F %T %z')}")
        self._end_orphans(history, log)
        end, phases = self._start(attempt, log)
        attempt = attempts.close(run, attempt, phases=phases, **_of(end))
        end = _end(attempt, end)
        mine = [_end(earlier) for earlier in history if earlier.job == self.place.job]
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
        end = self._judge(payload.exit_code or 0, hung, log)
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
                self._secure(log)
            if (hung := payload.look()) and not self.warning:
                log.phase("hang", hung)
                payload.end_hung()
                return hung
        return ""

    def _hear(self, signum: int, payload: Payload, log: Log) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT and self.interrupted and now - self.interrupted > AGAIN_S:
            self.at_once = True
        self.interrupted = self.interrupted or now
        warning = self.place.on_signal(signum)
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

    def _secure(self, log: Log) -> None:
        """The time is nearly over and the payload still saves: coming back goes first, saving goes on until the kill."""
        self.secure_at = None
        assert self.warning
        if self.plan.requeue and not self.warning.coming_back and self.warning.reason not in PEOPLE:
            log.phase("requeue", "the payload has not saved yet")
            if self.place.requeue(log.line):
                self.warning = replace(self.warning, coming_back=True)

    def _judge(self, code: int, hung: str, log: Log) -> End:
        """How the payload ended. Only the finish mark counts as finished, not exit code 0."""
        asked = self.run_folder.stop_request()  # also one by `slurmlight cancel`
        reason = self.warning.reason if self.warning else asked.reason if asked and not hung else ""
        kind: Kind = (
            "finished" if self.run_folder.finished()
            else "hang" if hung
            else {STOPPED: "stopped", BAD_CONFIG: "bad config", 0: "unfinished"}.get(code, "crash")
        )  # type: ignore[assignment]  # fmt: skip
        log.phase("ended", f"exit code {code}")
        if kind in ("finished", "stopped"):
            return End(kind, stop_reason=reason, exit_code=code)
        found = diagnosis.diagnose(log.text())
        return End(
            kind, stop_reason=reason, exit_code=code, cause=found.cause or hung, action=found.action, hopeless=found.hopeless
        )

    def _leave(self, decision: Decision, end: End) -> int:
        """The job ends here: say so in outcome.json and in one line."""
        person = end.stop_reason in PEOPLE
        state = "finished" if decision.verdict == "done" else "stopped" if person else "failed"
        text = f"run {self.run_folder.name} {state} at step {end.step}"
        if state == "finished":
            code = 0
        else:
            text += f": {decision.why}" + (f"; {decision.action}" if decision.action else "")
            code = STOPPED if person else BAD_CONFIG if end.kind == "bad config" else FAILED
            code = INTERRUPTED if self.at_once else code
        outcome = {"state": state, "cause": decision.why, "action": decision.action, "code": code}
        with suppress(OSError):
            write_json(outcome_path(self.run_folder), outcome | {"step": end.step, "time": time.time()})
        print(f"slurmlight: {text}", file=sys.stderr, flush=True)
        return code

    def _requeue(self, end: End, log: Log) -> int:
        """Under Slurm: have the job come back. TERM follows at once; exiting before it would end the job instead."""
        if self.warning and self.warning.coming_back:
            return STOPPED
        log.phase("requeue")
        if not self.place.requeue(log.line):
            return self._leave(Decision("stop", "Slurm did not requeue the job", "launch the same run again"), end)
        signal.sigtimedwait({signal.SIGTERM}, 60.0)
        return STOPPED


def outcome_path(run: RunFolder) -> Path:
    return run.path / "outcome.json"


def _of(end: End) -> dict[str, object]:
    return {"kind": end.kind, "stop_reason": end.stop_reason, "cause": end.cause, "exit_code": end.exit_code}


def _end(attempt: Attempt, end: End | None = None) -> End:
    """An attempt's end with what its record knows of steps."""
    end = end or End(attempt.kind, stop_reason=attempt.stop_reason, exit_code=attempt.exit_code, cause=attempt.cause)  # type: ignore[arg-type]
    step = attempt.complete_step if attempt.last_step is None else attempt.last_step
    return replace(end, step=step, made_step=attempt.steps > 0, complete_step=attempt.complete_step)


def _give_up(run: RunFolder, job: str, how: str) -> bool:
    """Called by the guard when a supervisor was killed: whether that has happened too often without a step."""
    mine = [attempt for attempt in attempts.close_lost(run, attempts.load(run)) if attempt.job == job]
    if mine:
        Log(attempts.log_path(run, mine[-1].attempt), mine[-1].started).phase("guard", how)
    last = mine[-BARREN_DEATHS:]
    hopeless = not mine or (len(last) == BARREN_DEATHS and all(one.kind == attempts.LOST and not one.steps for one in last))
    if hopeless:
        action = "see what kills it (memory?), then launch the same run again"
        write_json(outcome_path(run), {"state": "failed", "cause": how, "action": action, "step": 0, "time": time.time()})
        print(f"slurmlight: {how} {len(last)} times without a step; {action}", file=sys.stderr, flush=True)
    return hopeless


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
