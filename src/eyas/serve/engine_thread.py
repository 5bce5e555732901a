"""The engine on a thread of its own, and the way there and back.

The event loop puts calls into a queue; the thread makes them between steps, so nothing of the engine is ever touched
by two threads. What a step adds goes back in one call a step and loop. Loading happens on the thread too.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

from eyas.errors import EyasError
from eyas.serve.observe.observer import Observer
from eyas.types import Chunk, Request

if TYPE_CHECKING:
    from eyas.engine.controller import Controller
    from eyas.engine.round import RoundOutput
    from eyas.types import EngineState

Status = Literal["loading", "ready", "draining", "stopped", "failed"]
Call = Callable[[Any], None]
log = logging.getLogger(__name__)


class ServedEngine(Protocol):
    """What is used of an engine."""

    tokenizer: Any
    target: Any
    speculation: Any

    def submit(self, request: Request, *, deadline: float | None = None, queue_key: str = "") -> int:
        """Queue a request; its index. RequestError, QueueFullError."""

    def cancel(self, index: int) -> None:
        """End it; its last chunk, with its completion, comes with a later step."""

    def step(self) -> list[Chunk]:
        """One iteration: what it added to each sequence."""

    @property
    def idle(self) -> bool:
        """Is there nothing to do?"""

    def state(self) -> EngineState:
        """Counts for whoever watches."""

    @property
    def controller(self) -> Controller | None:
        """Who plans the trees."""

    @property
    def outcome(self) -> RoundOutput | None:
        """The last step's round."""


class EngineThread:
    """Loads an engine, steps it while there is work, and hands out what comes; the observer is told of every step."""

    def __init__(
        self,
        load: Callable[[], ServedEngine],
        *,
        observer: Observer | None = None,
        backlog: int = 1024,
    ) -> None:
        self._load, self._observer, self._backlog = load, observer, backlog
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()  # None = end now
        self._places: dict[int, tuple[Ticket, int]] = {}  # engine index -> whose it is; the thread's
        self._submitting = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._engine: ServedEngine | None = None
        self._changed: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self.status: Status = "loading"
        self.error: Exception | None = None
        """Why it failed."""

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    @property
    def engine(self) -> ServedEngine:
        """The engine, for what never changes: tokenizer, vocabulary, context. EngineStoppedError until it is there."""
        if self._engine is None:
            raise EngineStoppedError(f"the engine is {self.status}")
        return self._engine

    @property
    def idle(self) -> bool:
        """Is no sequence on its way?"""
        return not self._submitting and not self._places and self._calls.empty()

    async def changed(self) -> Status:
        """Wait until the status is another."""
        before = self.status
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        self._changed.append(waiter)
        try:
            while self.status == before:
                await event.wait()
        finally:
            self._changed.remove(waiter)
        return self.status

    async def submit(
        self, requests: Sequence[Request], *, deadline: float | None = None, queue_key: str = ""
    ) -> Ticket:
        """Queue all of these or none. RequestError, QueueFullError, EngineStoppedError."""
        if self.status != "ready":
            raise EngineStoppedError(f"the engine is {self.status}")
        ticket = Ticket(len(requests), self._backlog, self._cancel)
        queued: asyncio.Future[None] = ticket.loop.create_future()

        def call(engine: Any) -> None:
            indices: list[int] = []
            try:
                for request in requests:
                    indices.append(engine.submit(request, deadline=deadline, queue_key=queue_key))
            except Exception as error:  # noqa: BLE001  # a request that can't be queued is its own affair
                for index in indices:
                    engine.cancel(index)
                _tell(ticket.loop, _reject, queued, error)
                return
            ticket.indices = indices
            self._places |= {index: (ticket, place) for place, index in enumerate(indices)}
            _tell(ticket.loop, _resolve, queued)

        self._submitting += 1  # between the call's leaving the queue and its end it shows nowhere else
        self._calls.put(call)
        self._refuse_if_ended()  # it may have ended in between
        try:
            await queued
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        finally:
            self._submitting -= 1
        return ticket

    def drain(self) -> None:
        """Take nothing new; what runs goes on."""
        if self.status in ("loading", "ready"):
            self._become("draining")

    def stop(self) -> None:
        """End the thread after the step it is in; what runs is given up."""
        self._calls.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait for its end."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _cancel(self, ticket: Ticket, place: int) -> None:
        def call(engine: Any) -> None:
            if place < len(ticket.indices) and ticket.indices[place] in self._places:
                engine.cancel(ticket.indices[place])

        self._calls.put(call)

    def _run(self) -> None:
        try:
            engine = self._engine = self._load()
            if self.status == "loading":
                self._become("ready")
            while self._make_calls(engine):
                if not engine.idle:
                    self._deliver(engine.step())
                    if self._observer is not None:
                        plan = None if engine.controller is None else engine.controller.snapshot()
                        self._observer.stepped(engine.state(), plan, engine.outcome)
        except Exception as error:  # whatever it is, the process must learn that its engine is gone
            log.debug("the engine's thread ended", exc_info=error)
            self.error = error
        self._become("stopped" if self.error is None else "failed")
        self._refuse_if_ended()
        for ticket in {id(ticket): ticket for ticket, _ in self._places.values()}.values():
            _tell(ticket.loop, ticket.fail, EngineStoppedError(self._why()))
        self._places.clear()

    def _make_calls(self, engine: ServedEngine) -> bool:
        """Make the calls that wait, waiting for one if there is nothing else to do; False = the end."""
        while True:
            try:
                call = self._calls.get(block=engine.idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            call(engine)

    def _deliver(self, chunks: list[Chunk]) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, int, Chunk]]] = defaultdict(list)
        for chunk in chunks:
            if chunk.index not in self._places:  # cancelled as a group that wasn't queued as a whole
                continue
            ticket, place = self._places[chunk.index]
            if chunk.completion is not None:
                del self._places[chunk.index]
            batches[ticket.loop].append((ticket, place, chunk))
        for loop, batch in batches.items():
            _tell(loop, _hand_out, batch)

    def _refuse_if_ended(self) -> None:
        """Answer the calls that nobody will make any more."""
        while self.status in ("stopped", "failed") and not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call(_NoEngine(self._why()))

    def _why(self) -> str:
        return "the engine failed" if self.status == "failed" else "the server is going down"

    def _become(self, status: Status) -> None:
        self.status = status
        log.info("the engine is %s", status)
        for loop, event in list(self._changed):
            _tell(loop, event.set)


def _hand_out(batch: list[tuple[Ticket, int, Chunk]]) -> None:
    for ticket, place, chunk in batch:
        ticket.deliver(place, chunk)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _reject(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    """Make a call on a loop; one that is closed has nobody left to listen."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


class _NoEngine:
    """What calls meet after the end."""

    def __init__(self, why: str) -> None:
        self._why = why

    def submit(self, request: Request, **_: Any) -> int:  # noqa: ARG002  # the engine's signature
        raise EngineStoppedError(self._why)

    def cancel(self, index: int) -> None:
        """Everything has ended."""


# A group of sequences on its way through the engine, as the event loop sees it.


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
