"""Continuous batching over the decoder inside one event loop: no threads, no locks.

Requests wait in order of arrival for a place in their length class. Every round admits, runs one decoding step of each
class that has rows, and lets the event loop serve its sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from slurmlight.train.embedded.decoder import Array, Decoder, Weights, length_class
from slurmlight.train.embedded.sampling import choose

_KNOWN_PROMPTS = 64  # prefilled prompts kept: the samples of a task share theirs


class Replaced(Exception):
    """The weights were changed while the row was generated; half of each would be neither policy's sample."""


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Completion:
    """``tokens`` with their log-probabilities; the end token is included where ``finish_reason`` is stop."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass
class _Row:
    request: Request
    done: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class _Rows:
    """The rows of one length class under way, and their cache: row i of one is row i of the other, without gaps."""

    def __init__(self, decoder: Decoder, places: int, size: int) -> None:
        self.decoder = decoder
        self.places = places
        self.cache = decoder.new_cache(places, size)
        self.rows: list[_Row] = []

    def add(self, row: _Row, prefilled: list[Array]) -> None:
        for cache, new in zip(self.cache, prefilled, strict=True):
            cache[len(self.rows), :, : new.shape[1]] = new
        self.rows.append(row)

    def remove(self, place: int) -> None:
        """The last row takes the place: a row's bits do not depend on where it stands."""
        last = len(self.rows) - 1
        for cache in self.cache:
            cache[place] = cache[last]
        self.rows[place] = self.rows[last]
        self.rows.pop()

    def step(self) -> Array:
        """Logits [rows, vocabulary] after each row's last token."""
        tokens = [row.tokens[-1] for row in self.rows]
        return self.decoder.step(self.cache, tokens, [len(row.request.prompt) + len(row.tokens) - 1 for row in self.rows])


class Batcher:
    def __init__(self, decoder: Decoder, places: int, end_tokens: frozenset[int]) -> None:
        """``places`` rows of each length class are decoded at a time."""
        self.decoder = decoder
        self.places = places
        self.end_tokens = end_tokens
        self.cpu_seconds = 0.0  # of the process, spent in prefill and decoding
        self._waiting: deque[_Row] = deque()
        self._classes: dict[int, _Rows] = {}
        self._known: OrderedDict[tuple[int, ...], tuple[list[Array], Array]] = OrderedDict()
        self._work = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        """Raises Replaced where the weights change meanwhile."""
        row = _Row(request, asyncio.get_running_loop().create_future())
        self._waiting.append(row)
        self._work.set()
        return await row.done

    def replace(self, weights: Weights) -> None:
        """New weights from now on. Rows under way are given up."""
        rows = [*self._waiting, *(row for under_way in self._classes.values() for row in under_way.rows)]
        self.decoder.weights = weights
        self._waiting.clear()
        self._classes.clear()
        self._known.clear()
        for row in rows:
            if not row.done.done():
                row.done.set_exception(Replaced())

    async def run(self) -> None:
        while True:
            await self._work.wait()
            started = time.process_time()
            self._admit()
            busy = [under_way for under_way in self._classes.values() if under_way.rows]
            for under_way in busy:
                self._step(under_way)
            self.cpu_seconds += time.process_time() - started
            if not busy and not self._waiting:
                self._work.clear()
            await asyncio.sleep(0)

    def _step(self, under_way: _Rows) -> None:
        logits = under_way.step()
        for place in reversed(range(len(under_way.rows))):  # a removed row is replaced by one that was seen already
            if self._take(under_way.rows[place], logits[place]):
                under_way.remove(place)

    def _admit(self) -> None:
        """Give waiting rows a place; a row whose class is full waits without holding up the others."""
        for row in [self._waiting.popleft() for _ in range(len(self._waiting))]:
            size = length_class(len(row.request.prompt) + row.request.max_tokens)
            if size not in self._classes:
                self._classes[size] = _Rows(self.decoder, self.places, size)
            if len(self._classes[size].rows) == self.places:
                self._waiting.append(row)
                continue
            prefilled, logits = self._prefill(row.request.prompt)
            if not self._take(row, logits):
                self._classes[size].add(row, prefilled)

    def _prefill(self, prompt: list[int]) -> tuple[list[Array], Array]:
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self.decoder.prefill(prompt)
        self._known.move_to_end(key)
        while len(self._known) > _KNOWN_PROMPTS:
            self._known.popitem(last=False)
        return self._known[key]

    def _take(self, row: _Row, logits: Array) -> bool:
        """Sample the row's next token; True where the row is over (its client may have gone, too)."""
        request = row.request
        token, logprob = choose(logits, request.temperature, request.seed, len(row.tokens))
        row.tokens.append(token)
        row.logprobs.append(logprob)
        stopped = token in self.end_tokens
        if not stopped and len(row.tokens) < request.max_tokens:
            return row.done.cancelled()
        if not row.done.done():
            row.done.set_result(Completion(row.tokens, row.logprobs, "stop" if stopped else "length"))
        return True
