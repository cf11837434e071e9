"""Continuous batching over the decoder's fixed slots, inside one event loop: no threads, no locks.

Requests wait in order of arrival for a free slot of their length class. Every round admits, runs one decoding step of
each class that has rows, and lets the event loop serve its sockets.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch

from slurmlight.train.embedded.decoder import Decoder, Weights, length_class
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


class _Slots:
    """The rows of one length class, and their cache."""

    def __init__(self, decoder: Decoder, slots: int, size: int) -> None:
        self.decoder = decoder
        self.cache = decoder.new_cache(slots, size)
        self.rows: list[_Row | None] = [None] * slots

    def place(self, row: _Row, prefilled: list[torch.Tensor]) -> None:
        slot = self.rows.index(None)
        for cache, new in zip(self.cache, prefilled, strict=True):
            length = min(new.shape[1], cache.shape[2])
            cache[slot, :, :length] = new[:, :length]
        self.rows[slot] = row

    def step(self) -> list[tuple[int, _Row, torch.Tensor]]:
        """One decoding step; the live rows with their slot and logits. Idle slots compute too: the shape never changes."""
        last = [row.tokens[-1] if row else 0 for row in self.rows]
        positions = [len(row.request.prompt) + len(row.tokens) - 1 if row else 0 for row in self.rows]
        logits = self.decoder.step(self.cache, torch.tensor(last), torch.tensor(positions))
        return [(slot, row, logits[slot]) for slot, row in enumerate(self.rows) if row]


class Batcher:
    def __init__(self, decoder: Decoder, slots: int, end_tokens: frozenset[int]) -> None:
        self.decoder = decoder
        self.slots = slots
        self.end_tokens = end_tokens
        self.seconds = 0.0  # spent in prefill and decoding
        self._waiting: deque[_Row] = deque()
        self._classes: dict[int, _Slots] = {}
        self._known: OrderedDict[tuple[int, ...], tuple[list[torch.Tensor], torch.Tensor]] = OrderedDict()
        self._work = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        """Raises Replaced where the weights change meanwhile."""
        row = _Row(request, asyncio.get_running_loop().create_future())
        self._waiting.append(row)
        self._work.set()
        return await row.done

    def replace(self, weights: Weights) -> None:
        """New weights from now on. Rows under way are given up."""
        rows = [*self._waiting, *(row for slots in self._classes.values() for row in slots.rows if row)]
        self.decoder.weights = weights
        self._waiting.clear()
        self._classes.clear()
        self._known.clear()
        for row in rows:
            if not row.done.done():
                row.done.set_exception(Replaced())

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await self._work.wait()
            started = clock()
            self._admit()
            busy = [slots for slots in self._classes.values() if any(slots.rows)]
            for slots in busy:
                for slot, row, logits in slots.step():
                    if self._take(row, logits):
                        slots.rows[slot] = None
            self.seconds += clock() - started
            if not busy and not self._waiting:
                self._work.clear()
            await asyncio.sleep(0)

    def _admit(self) -> None:
        """Give waiting rows a slot; a row whose class is full waits without holding up the others."""
        for row in [self._waiting.popleft() for _ in range(len(self._waiting))]:
            size = length_class(len(row.request.prompt) + row.request.max_tokens)
            if size not in self._classes:
                self._classes[size] = _Slots(self.decoder, self.slots, size)
            if None not in self._classes[size].rows:
                self._waiting.append(row)
                continue
            prefilled, logits = self._prefill(row.request.prompt)
            if not self._take(row, logits):
                self._classes[size].place(row, prefilled)

    def _prefill(self, prompt: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self.decoder.prefill(prompt)
        self._known.move_to_end(key)
        while len(self._known) > _KNOWN_PROMPTS:
            self._known.popitem(last=False)
        return self._known[key]

    def _take(self, row: _Row, logits: torch.Tensor) -> bool:
        """Sample the row's next token; True where the row is over."""
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
