"""Do credit, reward mix and curriculum matter on the tiny task?  make bench-learning

From one shared warm start (about a minute where models/tiny is not there), every variant is trained with three seeds; a line a
run as it ends, then a table: accuracy on the untouched test questions, and steps until the validation questions are at 0.8.
The parts are the engine's own (rewards, credit, course, GRPO update, decoder), without gateway, agent graph and HTTP between.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

STEPS = 18
EVERY = 2  # steps between looks at the validation questions
SEEDS = (0, 1, 2)
GOAL = 0.8
PHASES = "[{{difficulty=0.3,steps={0}}},{{difficulty=0.6,steps={0}}},{{{1}}}]"


def mix(**weights: float) -> str:
    parts = ",".join(f'{{name="{name}",weight={weight}}}' for name, weight in weights.items())
    return f"reward=[{parts}]"


def variants(steps: int) -> dict[str, list[str]]:
    third = max(1, steps // 3)
    syntax, process = mix(execution_match=0.6, syntax=0.4), mix(execution_match=0.6, process=0.3, efficiency=0.1)
    return {
        "execution match, every call alike": [],
        "credit: last call": ["credit.kind=last"],
        "credit: discounted 0.5": ["credit.kind=discounted", "credit.gamma=0.5"],
        "reward: 0.6 execution + 0.4 syntax": [syntax],
        "reward: 0.6 + 0.3 process + 0.1 efficiency": [process],
        "the same, credit: process": [process, "credit.kind=process"],
        "curriculum: easy, medium, all": [f"curriculum={PHASES.format(third, '')}"],
        "curriculum, last phase adversarial": [f"curriculum={PHASES.format(third, 'adversarial=true')}"],
        "sampling: prefer mixed outcomes": ["sampling.prefer_mixed=true"],
    }


@dataclass(frozen=True)
class Outcome:
    """``to_goal`` is None where the validation questions never were at the goal. ``accuracy`` is of the test questions."""

    variant: str
    seed: int
    start: float
    accuracy: float
    best_validation: float
    to_goal: int | None
    seconds: float


def main() -> None:
    """Arguments: steps, then names of variants; without names all."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    chosen = {name: given for name, given in variants(steps).items() if not sys.argv[2:] or name in sys.argv[2:]}
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # two runs at a time, a core each
    started, outcomes = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="bench-learning-") as scratch:
        base = prepare(Path(scratch))
        jobs = [(name, [*base, *given, f"engine.seed={seed}"], seed) for seed in SEEDS for name, given in chosen.items()]
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            for future in as_completed([pool.submit(train, *job, steps, scratch) for job in jobs]):
                outcomes.append(future.result())
                print(f"{len(outcomes)}/{len(jobs)} {asdict(outcomes[-1])}", flush=True)
    print(f"\n{steps} steps, {time.perf_counter() - started:.0f} s in all\n")
    print("\n".join(table(outcomes, list(chosen))))


def prepare(scratch: Path) -> list[str]:
    """The settings that all share: data and warm start made once."""
    from slurmlight import presets
    from slurmlight.train.embedded.prepare import make_tiny

    model = Path("models/tiny").absolute() if Path("models/tiny").is_dir() else scratch / "models/tiny"
    files = {name: scratch / f"data/{name}.parquet" for name in ("train", "val", "test")}
    settings = [f"data.{name}_files={path}" for name, path in files.items()]
    settings += [f"actor_rollout_ref.model.path={model}", "data.unseen_files="]
    print("warm start ...", flush=True)
    make_tiny(presets.load("tiny", settings), lambda step, steps, loss: None)
    return settings


def train(variant: str, settings: list[str], seed: int, steps: int, scratch: str) -> Outcome:
    """One run, in a process of its own with one thread."""
    import torch
    from bench_loop import Loop

    from slurmlight import presets

    torch.set_num_threads(1)
    started = time.perf_counter()
    loop = Loop(presets.load("tiny", settings), Path(scratch, "adversarial"), Path(tempfile.mkdtemp(dir=scratch)))
    seen = {0: loop.accuracy("val")}
    for step in range(1, steps + 1):
        loop.step(step)
        if step % EVERY == 0 or step == steps:
            seen[step] = loop.accuracy("val")
    to_goal = next((step for step, value in seen.items() if value >= GOAL), None)
    spent = time.perf_counter() - started
    return Outcome(variant, seed, seen[0], loop.accuracy("test"), max(seen.values()), to_goal, round(spent, 1))


def table(outcomes: Sequence[Outcome], names: Sequence[str]) -> list[str]:
    lines = ["| variant | test accuracy: seeds | mean | steps to 0.8: seeds |", "|---|---|---|---|"]
    for name in names:
        found = sorted((one for one in outcomes if one.variant == name), key=lambda one: one.seed)
        accuracies = [one.accuracy for one in found]
        reached: list[Any] = ["-" if one.to_goal is None else one.to_goal for one in found]
        seeds = " ".join(f"{value:.3f}"[1:] for value in accuracies)
        lines.append(f"| {name} | {seeds} | {mean(accuracies):.3f} | {' '.join(map(str, reached))} |")
    return lines


if __name__ == "__main__":
    main()
