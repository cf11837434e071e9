"""GRPO of the tiny policy in one process: the engine's parts without gateway, agent graph and HTTP (bench_learning.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlight.agents.contract import Episode, SqlTask, Turn, call_seed
from slurmlight.agents.parse import parse
from slurmlight.agents.prompts import Prompts
from slurmlight.presets import Preset
from slurmlight.rewards.sql import execution_match
from slurmlight.sql.execute import execute
from slurmlight.train.embedded.actor import Actor
from slurmlight.train.embedded.batch import make_batch
from slurmlight.train.embedded.batcher import Batcher, Request
from slurmlight.train.embedded.course import Course
from slurmlight.train.embedded.decoder import Decoder, load_weights, read_shape
from slurmlight.train.embedded.order import episode_seed
from slurmlight.train.embedded.prepare import load_splits
from slurmlight.train.embedded.steady import Steady
from slurmlight.train.embedded.tokens import ChatTokens
from slurmlight.train.rollouts.play import Call, Job, Played
from slurmlight.train.rollouts.sql_player import make_judge


@dataclass(frozen=True)
class Told:
    """An episode, and its calls as the update needs them."""

    episode: Episode
    calls: tuple[Call, ...]


class Loop:
    def __init__(self, preset: Preset, variants: Path, weights: Path) -> None:
        """``variants`` gets the databases of adversarial tasks, ``weights`` the policy of the last step."""
        self.preset, self.weights = preset, weights
        model = Path(preset.actor_rollout_ref.model.path)
        self.tokens, self.shape = ChatTokens(model), read_shape(model)
        decoder = Decoder(self.shape, load_weights(model, self.shape), 512)
        self.batcher = Batcher(decoder, 96, self.tokens.end_tokens)
        self.prompts = Prompts(compact=True, max_tokens=preset.data.max_prompt_length)
        self.actor, self.judge, self.steady = Actor(preset), make_judge(preset), Steady(preset)
        self.splits = load_splits(preset)
        self.course = Course(self.splits["train"], preset, variants)

    def step(self, step: int) -> None:
        seed, n = self.preset.engine.seed, self.preset.actor_rollout_ref.rollout.n
        drawn = self.course.draw(step)
        asked = [(task, episode_seed(seed, step, index, sample)) for index, task in drawn for sample in range(n)]
        told = self._play(asked, self.preset.actor_rollout_ref.rollout.temperature)
        played = [self._judged(task, one) for (task, _), one in zip(asked, told, strict=True)]
        self.course.note(drawn, played)
        self.actor.update(make_batch(self.steady.rescale(played), self.preset).mini_batches)
        self.actor.export(self.weights)
        self.batcher.replace(load_weights(self.weights, self.shape))

    def accuracy(self, split: str) -> float:
        """Greedy, by plain execution match on every instance."""
        tasks = self.splits[split]
        told = self._play([(task, 0) for task in tasks], 0.0)
        right = [
            execution_match(task.gold, one.episode.answer, files(task)).score for task, one in zip(tasks, told, strict=True)
        ]
        return sum(right) / len(right)

    def _judged(self, task: SqlTask, told: Told) -> Played:
        score = self.judge(told.episode, task.gold, files(task))
        parts = {} if score.parts is None else {"plain": score.parts.plain, "calls": score.parts.calls}
        return Played(Job("", {}, True), score.reward, score.reason, told.calls, parts=parts)

    def _play(self, asked: Sequence[tuple[SqlTask, int]], temperature: float) -> list[Told]:
        async def all_of_them() -> list[Told]:
            self.batcher._work = asyncio.Event()  # of this event loop
            running = asyncio.create_task(self.batcher.run())
            done = await asyncio.gather(*(self._episode(task, seed, temperature) for task, seed in asked))
            running.cancel()
            return done

        return asyncio.run(all_of_them())

    async def _episode(self, task: SqlTask, seed: int, temperature: float) -> Told:
        """The rule-checked agent of the tiny preset. Of calls with one prompt the last counts, as the gateway has it."""
        context = self.prompts.context(task)
        messages, node, turns, calls = self.prompts.write(context), "write", [], {}
        answer, ran = "", False
        for place in range(task.max_turns):
            prompt = self.tokens.encode(messages, {})
            limit = self.preset.data.max_response_length
            done = await self.batcher.generate(Request(prompt, limit, temperature, call_seed(seed, place) or 0))
            calls.pop(tuple(prompt), None)
            calls[tuple(prompt)] = Call(tuple(prompt), tuple(done.tokens), tuple(done.logprobs))
            text = self.tokens.decode(done.tokens)
            parsed = parse(text)
            result = execute(task.database, parsed.sql) if parsed.sql else None
            rows = result is not None and result.kind == "rows"
            outcome = "" if result is None else "empty" if rows and not result.rows else result.kind
            turns.append(Turn(node, True, messages, text, parsed.sql, outcome, completion_tokens=len(done.tokens)))
            if parsed.sql and (rows or not ran):
                answer, ran = parsed.sql, rows
            if outcome == "rows":
                break
            feedback = self.prompts.tell(result) if result else self.prompts.tell_no_query(parsed.failure)
            messages, node = self.prompts.rewrite(context, parsed.sql, feedback), "rewrite"
        return Told(Episode(task, answer, tuple(turns)), tuple(calls.values()))


def files(task: SqlTask) -> list[Path]:
    return [task.database, *(Path(path) for path in task.extra.get("instances", []))]
