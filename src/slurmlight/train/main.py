"""The payload: train one run until it is finished, stopped or broken.

    python -m slurmlight.train.main RUN_FOLDER

Exit codes: 0 finished (also when it was finished before), 75 saved and stopped on request, 2 bad configuration or data
(starting again would fail alike), 1 everything else (starting again resumes from the newest checkpoint).
SIGUSR1 prints all stacks. SIGTERM and the first Ctrl-C ask for a stop at the next step boundary, a second Ctrl-C ends at once.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from slurmlight.errors import UserError
from slurmlight.presets.schema import EngineSection
from slurmlight.runfolder import RunFolder, StopRequest
from slurmlight.train.config import read_preset
from slurmlight.train.engine import EXIT_BAD_CONFIG, EXIT_FINISHED, EXIT_STOPPED, Engine, TrainingRun

EXIT_CRASHED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m slurmlight.train.main RUN_FOLDER", file=sys.stderr)
        return EXIT_BAD_CONFIG
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    folder = RunFolder(arguments[0])
    try:
        return train(folder)
    except UserError as error:
        return _say(error, error.exit_code)
    except KeyboardInterrupt:
        return _say("interrupted; start the run again, it resumes from its last checkpoint", EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return _say(f"{error}; make room, then start the run again: it resumes from its last checkpoint", EXIT_CRASHED)
        if error.errno in (errno.EACCES, errno.EROFS) and folder.path in Path(error.filename or "/").parents:
            return _say(f"run folder {folder.path} cannot be written ({error}); give it the right owner", EXIT_BAD_CONFIG)
        raise
    except RuntimeError as error:
        if _is_expected(error):
            return _say(error, EXIT_CRASHED)
        raise


def train(folder: RunFolder) -> int:
    """Run the engine the preset names. Raises what the engine raises."""
    if (mark := folder.finished()) is not None:
        print(f"run {folder.name} was finished at step {mark.get('step')}: nothing to do", flush=True)
        return EXIT_FINISHED
    preset = read_preset(folder.path)
    run = TrainingRun(folder, preset, _attempt(folder))
    _forget_old_stop(run)
    _listen(run)
    outcome = _engine(preset.engine).train(run)
    if not outcome.finished:
        print(f"stopped on request after step {outcome.step}, which is saved; start the run again to go on", flush=True)
        return EXIT_STOPPED
    folder.mark_finished(outcome.step, run.attempt)
    print(f"finished at step {outcome.step}", flush=True)
    return EXIT_FINISHED


def _engine(asked: EngineSection) -> Engine:
    """Engines are imported when they are needed: each brings its own heavy packages."""
    if asked.name == "embedded":
        from slurmlight.train.embedded.engine import EmbeddedEngine

        return EmbeddedEngine()
    if asked.stack == "seed":
        from slurmlight.train.seed.engine import SeedEngine

        return SeedEngine()
    from slurmlight.train.verl.engine import VerlEngine

    return VerlEngine()


def _attempt(folder: RunFolder) -> int:
    """The supervisor says which attempt this is; started by hand, it is the one after the last."""
    told = os.environ.get("SLURMLIGHT_ATTEMPT", "")
    return int(told) if told.isdigit() else max(folder.attempt_numbers(), default=0) + 1


def _forget_old_stop(run: TrainingRun) -> None:
    request = run.folder.stop_request()
    if request is not None and request.attempt < run.attempt:
        run.folder.clear_stop()


def _listen(run: TrainingRun) -> None:
    def ask(signum: int, _: FrameType | None) -> None:
        name = signal.Signals(signum).name
        print(f"{name}: finishing the step and saving; Ctrl-C ends at once", file=sys.stderr, flush=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run.folder.request_stop(StopRequest(name, run.attempt))

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, ask)


def _is_expected(error: RuntimeError) -> bool:
    from slurmlight.train.rollouts.children import ChildEnded
    from slurmlight.train.rollouts.play import TooManyFailed

    return isinstance(error, ChildEnded | TooManyFailed)


def _say(error: BaseException | str, code: int) -> int:
    print(f"slurmlight: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
