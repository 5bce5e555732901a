"""A group of sequences on its way through the engine, as the event loop sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from eyas.errors import EyasError
from eyas.types import Chunk


class TooSlowError(EyasError):
    """Its reader took too little for too long."""


class EngineStoppedError(EyasError):
    """The engine ended before the sequences did."""


class Ticket:
    """What the engine adds to each of `count` sequences, in order; iterate until all of them have ended.

    It lives on one event loop; only `deliver` and `fail` are called for the engine's thread, through that loop.
    """

    def __init__(self, count: int, backlog: int, cancel: Callable[[Ticket, int], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.indices: list[int] = []
        """The engine's numbers of the sequences; the engine's thread sets and reads them."""
        self._open = set(range(count))
        self._cancelled: set[int] = set()
        self._backlog, self._cancel = backlog, cancel
        self._waiting: deque[tuple[int, Chunk]] = deque()
        self._error: EyasError | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        return self

    async def __anext__(self) -> tuple[int, Chunk]:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft()

    def cancel(self, place: int | None = None) -> None:
        """End one sequence, or all that haven't ended; what it has got still comes, with its completion."""
        for each in sorted(self._open) if place is None else [place]:
            if each in self._open and each not in self._cancelled:
                self._cancelled.add(each)
                self._cancel(self, each)

    def deliver(self, place: int, chunk: Chunk) -> None:
        """Take a chunk."""
        if place not in self._open:
            return
        if chunk.completion is not None:
            self._open.discard(place)
        self._waiting.append((place, chunk))
        self._news.set()
        if len(self._waiting) > self._backlog and self._error is None:
            self.fail(TooSlowError(f"the reader is {len(self._waiting)} chunks behind the engine: cancelled"))
            self.cancel()

    def fail(self, error: EyasError) -> None:
        """Nothing more comes after what is there."""
        self._error = error
        self._news.set()
