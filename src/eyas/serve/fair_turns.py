"""Turns on the event loop, which share among clients, and their users, what only a few requests can do at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eyas.engine.fair_share import FairQueue, client_of
from eyas.errors import QueueFullError

T = TypeVar("T")
_MAX_WAITING = 32 << 20
"""Maximum waiting characters; beyond it, clients that have text waiting already are refused."""


@dataclass(eq=False)
class _Waiting:
    """A request that waits for its turn."""

    index: int
    key: str
    longest: int
    """Its cost in characters."""
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairTurns:
    """Turns that up to `at_once` requests have at the same time."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._queue = FairQueue[_Waiting]()
        self._taken = 0

    def waiting(self, client: str) -> int:
        """How many requests of a client wait."""
        return self._queue.count(client)

    @property
    def characters(self) -> int:
        """The characters of all that wait."""
        return sum(one.longest for one in self._queue)

    async def take(self, key: str, characters: int) -> None:
        """Wait for the turn of a request of this queue key; `give_back` ends it. If cancelled, there is no turn."""
        one = _Waiting(self._taken, key, characters)
        self._taken += 1
        self._queue.push(one)
        self._give()
        try:
            await one.turn
        except asyncio.CancelledError:
            if one in self._queue:
                self._queue.remove(one)
            elif not one.turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """End a turn, so that the next one begins."""
        self._free += 1
        self._give()

    def _give(self) -> None:
        while self._free and self._queue:
            turn = self._queue.pop().turn
            if not turn.cancelled():  # else its request was cancelled but hasn't removed it yet
                self._free -= 1
                turn.set_result(None)


class FairWorkers:
    """A thread pool for one event loop, whose threads clients take turns with."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._turns = FairTurns(threads)

    async def run(self, key: str, characters: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on one of the threads when it is this queue key's turn. Raises QueueFullError.

        A call that is cancelled before its turn is never made. If cancelled later, it runs to its end on its thread.
        """
        if self._turns.characters + characters > _MAX_WAITING and self._turns.waiting(client_of(key)):
            raise QueueFullError("too much text is waiting to be read: try again later", 5.0)
        await self._turns.take(key, characters)
        loop = asyncio.get_running_loop()
        call = self._pool.submit(function, *arguments)

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._turns.give_back)

        call.add_done_callback(ended)
        return await asyncio.wrap_future(call)
