"""One GRPO step of the tiny preset: by the engine, and in one process without gateway, agent graph and HTTP (bench_tiny.py)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import mean
from typing import Any

from slurmlight import presets
from slurmlight.agents.contract import SqlTask, call_seed
from slurmlight.agents.parse import parse
from slurmlight.agents.prompts import Prompts
from slurmlight.data.tasks import load_tasks
from slurmlight.presets import Preset
from slurmlight.rewards.sql import execution_match
from slurmlight.runfolder import RunFolder
from slurmlight.sql.execute import execute
from slurmlight.train.embedded.actor import Actor
from slurmlight.train.embedded.batch import make_batch
from slurmlight.train.embedded.batcher import Batcher, Request
from slurmlight.train.embedded.decoder import Decoder, load_weights, read_shape
from slurmlight.train.embedded.engine import EmbeddedEngine
from slurmlight.train.embedded.order import DataOrder, episode_seed
from slurmlight.train.embedded.prepare import make_tiny
from slurmlight.train.embedded.tokens import ChatTokens
from slurmlight.train.engine import TrainingRun
from slurmlight.train.rollouts.play import Call, Job, Played

STEPS = 8  # the first is left out: imports, connections, compiled graph


def bench_step(folder: Path) -> None:
    warm = Path("models/tiny").is_dir()
    model = Path("models/tiny").absolute() if warm else folder / "tiny"
    preset = presets.load(
        "tiny",
        [
            f"data.train_files={folder}/data/train.parquet",
            f"data.val_files={folder}/data/val.parquet",
            "data.test_files=",
            "data.unseen_files=",
            f"actor_rollout_ref.model.path={model}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.test_freq=0",
            "trainer.save_freq=100",
            'trainer.logger=["console"]',
        ],
    )
    if not warm:
        print("warm start ...", flush=True)
        make_tiny(preset, lambda step, steps, loss: None)
    rows = by_engine(folder / "step", preset)
    alone = in_process(preset)
    engine = {name: mean(row[f"timing_s/{name}"] for row in rows) for name in ("step", "gen", "update_actor")}
    cpu = {name: mean(row[f"cpu_s/{name}"] for row in rows) for name in ("generation", "policy_server", "gateway", "runners")}
    print(f"step, means of {STEPS - 1} of {preset.data.train_batch_size} x {preset.actor_rollout_ref.rollout.n} episodes:")
    print(f"  engine      {engine['step']:6.2f} s: rollouts {engine['gen']:.2f}, update {engine['update_actor']:.2f}")
    print(
        f"              CPU-s of the rollouts: generation {cpu['generation']:.2f}, its HTTP and tokens "
        f"{cpu['policy_server'] - cpu['generation']:.2f}, gateway {cpu['gateway']:.2f}, agent and runner {cpu['runners']:.2f}"
    )
    total = sum(alone.values())
    print(f"  in process  {total:6.2f} s: " + ", ".join(f"{name} {value:.2f}" for name, value in alone.items()))
    print(f"  ratio       {engine['step'] / total:6.2f}")


def by_engine(run: Path, preset: Preset) -> list[dict[str, Any]]:
    from bench_tiny import write_run

    write_run(run, preset)
    folder = RunFolder(run)
    EmbeddedEngine().train(TrainingRun(folder, preset, 1))
    return [row for row in folder.metric_rows() if row["step"] > 1]


def in_process(preset: Preset) -> dict[str, float]:
    """Seconds a step in generation, agent (prompts, queries, rewards) and update, without any other process."""
    model = Path(preset.actor_rollout_ref.model.path)
    tokens, shape = ChatTokens(model), read_shape(model)
    batcher = Batcher(Decoder(shape, load_weights(model, shape), 512), 96, tokens.end_tokens)
    actor = Actor(preset)
    tasks = load_tasks(preset.data.train_files, instances=preset.data.instances)
    order = DataOrder(len(tasks), preset.data.train_batch_size, preset.engine.seed)
    prompts = Prompts(compact=True, max_tokens=preset.data.max_prompt_length)
    spent: dict[str, list[float]] = {"generation": [], "agent": [], "update": []}
    for step in range(1, STEPS + 1):
        started, generated = time.perf_counter(), batcher.cpu_seconds
        chosen = [(index, sample) for index in order.tasks(step) for sample in range(preset.actor_rollout_ref.rollout.n)]
        episodes = asyncio.run(
            play(batcher, tokens, prompts, [(tasks[index], episode_seed(0, step, index, sample)) for index, sample in chosen])
        )
        played, generation = time.perf_counter(), batcher.cpu_seconds - generated
        actor.update(make_batch(episodes, preset).mini_batches)
        if step > 1:
            spent["generation"].append(generation)
            spent["agent"].append(played - started - generation)
            spent["update"].append(time.perf_counter() - played)
    return {name: mean(values) for name, values in spent.items()}


async def play(batcher: Batcher, tokens: ChatTokens, prompts: Prompts, asked: list[tuple[SqlTask, int]]) -> list[Played]:
    running = asyncio.create_task(batcher.run())
    done = await asyncio.gather(*(episode(batcher, tokens, prompts, task, seed) for task, seed in asked))
    running.cancel()
    batcher._work = asyncio.Event()  # the next step has another event loop
    return done


async def episode(batcher: Batcher, tokens: ChatTokens, prompts: Prompts, task: SqlTask, seed: int) -> Played:
    context = prompts.context(task)
    messages, calls, answer = prompts.write(context), [], ""
    for turn in range(task.max_turns):
        prompt = tokens.encode(messages, {})
        done = await batcher.generate(Request(prompt, 36, 1.0, call_seed(seed, turn) or 0))
        calls.append(Call(tuple(prompt), tuple(done.tokens), tuple(done.logprobs)))
        answer = parse(tokens.decode(done.tokens)).sql
        result = execute(task.database, answer)
        if result.kind == "rows" and result.rows:
            break
        messages = prompts.rewrite(context, answer, prompts.tell(result))
    databases = [task.database, *(Path(path) for path in task.extra["instances"])]
    verdict = execution_match(task.gold, answer, databases)
    return Played(Job("", {}, True), float(verdict.score), calls=tuple(calls))
