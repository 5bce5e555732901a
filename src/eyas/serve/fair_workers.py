"""Threads for slow functions, beside the event loop: clients take turns, and what nobody waits for isn't begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eyas.engine.fair_queue import FairQueue, client_of
from eyas.errors import QueueFullError

T = TypeVar("T")
_MOST_WAITING = 32 << 20
"""The most characters that wait; beyond it a client with any waiting is refused."""


@dataclass(eq=False)
class _Job:
    """A call that waits for its turn."""

    index: int
    key: str
    longest: int
    """Its cost in characters."""
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairWorkers:
    """A pool of threads for one event loop, whose turns are shared fairly by clients and their users."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._queue = FairQueue[_Job]()
        self._submitted = 0

    async def run(self, key: str, characters: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on one of the threads when it is the turn of this queue key; QueueFullError.

        A call that is cancelled before its turn is never made; later it goes on, and holds its thread until it ends.
        """
        waiting = sum(job.longest for job in self._queue)
        if waiting + characters > _MOST_WAITING and self._queue.count(client_of(key)):
            raise QueueFullError("too much text waits to be read: try again later", 5.0)
        job = _Job(self._submitted, key, characters)
        self._submitted += 1
        self._queue.push(job)
        self._give_turns()
        try:
            await job.turn
        except asyncio.CancelledError:
            if job in self._queue:
                self._queue.remove(job)
            else:
                self._ended()
            raise
        loop, call = asyncio.get_running_loop(), self._pool.submit(function, *arguments)

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._ended)

        call.add_done_callback(ended)
        return await asyncio.wrap_future(call)

    def _ended(self) -> None:
        self._free += 1
        self._give_turns()

    def _give_turns(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            self._queue.pop().turn.set_result(None)
