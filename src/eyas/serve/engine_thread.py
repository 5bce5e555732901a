"""The engine on a thread of its own, and the handles through which the event loop follows its requests.

The event loop never touches the engine: it queues calls, which the thread makes between two steps. The chunks of a step
are delivered to each event loop in one call. The engine is also loaded on the thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
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
_CALLS = 0.05
"""Maximum seconds spent on queued calls between two steps."""


class TooSlowError(EyasError):
    """The client reads its response too slowly: too many chunks are waiting for it."""


class EngineStoppedError(EyasError):
    """The engine isn't ready, or it ended before the sequences did."""


class ServedEngine(Protocol):
    """The part of an engine that the server uses."""

    tokenizer: Any
    target: Any
    speculation: Any

    def submit(self, request: Request, *, deadline: float | None = None, queue_key: str = "") -> int:
        """Queue a request and return its index. Raises RequestError or QueueFullError."""

    def cancel(self, index: int) -> None:
        """End a request; its last chunk, with its completion, comes with a later step."""

    def step(self) -> list[Chunk]:
        """Run one iteration and return what it added to each sequence."""

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""

    def state(self) -> EngineState:
        """Counts of sequences and tokens, for observers."""

    @property
    def controller(self) -> Controller | None:
        """The controller that sizes trees by measured cost; None with fixed trees."""

    @property
    def outcome(self) -> RoundOutput | None:
        """The decoding round of the last step; None if no sequence was decoding."""


class EngineThread:
    """Loads an engine, steps it while there is work, delivers its chunks, and reports every step to the observer."""

    def __init__(
        self, load: Callable[[], ServedEngine], *, observer: Observer | None = None, backlog: int = 1024
    ) -> None:
        """`backlog`: maximum chunks that may wait for a request's reader before the request is cancelled."""
        self._load = load
        self._observer = observer
        self._backlog = backlog
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()  # None = stop
        self._sequences: dict[int, tuple[RequestHandle, int]] = {}  # by engine index: its handle and choice index
        self._submitting = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._engine: ServedEngine | None = None
        self.status: Status = "loading"
        self.error: Exception | None = None
        """Why loading or a step failed; None unless the status is `failed`."""

    def start(self) -> None:
        """Start the thread, which begins by loading the engine."""
        self._thread.start()

    @property
    def engine(self) -> ServedEngine:
        """The engine, to read constants (tokenizer, vocabulary, context). Raises EngineStoppedError until loaded."""
        if self._engine is None:
            raise EngineStoppedError(f"the engine is {self.status}")
        return self._engine

    @property
    def idle(self) -> bool:
        """Whether no sequence is queued, decoding or being submitted."""
        return not self._submitting and not self._sequences and self._calls.empty()

    async def submit(
        self, requests: Sequence[Request], *, deadline: float | None = None, queue_key: str = ""
    ) -> RequestHandle:
        """Queue all of these sequences or none. Raises RequestError, QueueFullError or EngineStoppedError."""
        if self.status != "ready":
            raise EngineStoppedError(f"the engine is {self.status}")
        handle = RequestHandle(len(requests), self._backlog, self._cancel)
        queued: asyncio.Future[None] = handle.loop.create_future()

        def submit_all(engine: Any) -> None:
            indices: list[int] = []
            try:
                for request in requests:
                    indices.append(engine.submit(request, deadline=deadline, queue_key=queue_key))
            except Exception as error:  # noqa: BLE001  # goes to the submitter and doesn't end the thread
                for index in indices:
                    engine.cancel(index)
                _call_on_loop(handle.loop, _settle, queued, error)
                return
            handle.engine_indices = indices
            self._sequences |= {index: (handle, choice_index) for choice_index, index in enumerate(indices)}
            _call_on_loop(handle.loop, _settle, queued)

        self._submitting += 1  # keeps `idle` false while the call has left the queue but isn't done
        self._calls.put(submit_all)
        self._refuse_if_ended()  # the thread may have ended since the status was read
        try:
            await queued
        except asyncio.CancelledError:
            handle.cancel()
            raise
        finally:
            self._submitting -= 1
        return handle

    def drain(self) -> None:
        """Refuse new requests and let running ones continue."""
        if self.status in ("loading", "ready"):
            self._become("draining")

    def stop(self) -> None:
        """End the thread after the current step; running requests end with EngineStoppedError."""
        self._calls.put(None)

    @property
    def unfinished(self) -> int:
        """Number of sequences that were handed over and haven't ended."""
        return len(self._sequences)

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the thread to end; not at all while it loads, which can't be interrupted."""
        if self.alive and (self._engine is not None or self.status in ("stopped", "failed")):
            self._thread.join(seconds)

    def _cancel(self, handle: RequestHandle, choice_index: int) -> None:
        def cancel_one(engine: Any) -> None:
            indices = handle.engine_indices
            if choice_index < len(indices) and indices[choice_index] in self._sequences:
                engine.cancel(indices[choice_index])

        self._calls.put(cancel_one)

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
        except Exception as error:  # the process must learn of any error that ends its engine
            log.debug("the engine's thread ended", exc_info=error)
            self.error = error
        self._become("stopped" if self.error is None else "failed")
        self._refuse_if_ended()
        for handle in {id(handle): handle for handle, _ in self._sequences.values()}.values():
            _call_on_loop(handle.loop, handle.fail, EngineStoppedError(_why_ended(self.status)))
        self._sequences.clear()

    def _make_calls(self, engine: ServedEngine) -> bool:
        """Make the queued calls, waiting for one if the engine is idle; return False once `stop` was called.

        The time is limited, because a client that leaves may cancel a hundred long sequences while others wait.
        """
        end = time.monotonic() + _CALLS
        while engine.idle or time.monotonic() < end:
            try:
                call = self._calls.get(block=engine.idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            call(engine)
        return True

    def _deliver(self, chunks: list[Chunk]) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[RequestHandle, int, Chunk]]] = defaultdict(list)
        for chunk in chunks:
            if chunk.index not in self._sequences:  # cancelled: another sequence of its request couldn't be queued
                continue
            handle, choice_index = self._sequences[chunk.index]
            if chunk.completion is not None:
                del self._sequences[chunk.index]
            batches[handle.loop].append((handle, choice_index, chunk))
        for loop, batch in batches.items():
            _call_on_loop(loop, _deliver_batch, batch)

    def _refuse_if_ended(self) -> None:
        """Refuse the queued calls if the thread that would make them has ended."""
        while self.status in ("stopped", "failed") and not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call(_EndedEngine(_why_ended(self.status)))

    def _become(self, status: Status) -> None:
        self.status = status
        log.info("the engine is %s", status)


class RequestHandle:
    """The sequences of one HTTP request in the engine; iterate over (choice index, chunk) until all have ended.

    A handle belongs to one event loop. The engine's thread calls `deliver` and `fail` through that loop only.
    """

    def __init__(self, count: int, backlog: int, cancel: Callable[[RequestHandle, int], None]) -> None:
        """`cancel` is called with this handle and a choice index to end that sequence."""
        self.loop = asyncio.get_running_loop()
        self.engine_indices: list[int] = []
        """The engine's index of each sequence; only the engine's thread sets and reads them."""
        self._open = set(range(count))
        self._cancelled: set[int] = set()
        self._backlog = backlog
        self._cancel = cancel
        self._waiting: deque[tuple[int, Chunk]] = deque()
        self._error: EyasError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        return self

    async def __anext__(self) -> tuple[int, Chunk]:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    def cancel(self, choice_index: int | None = None) -> None:
        """End one sequence, or all; their last chunks, with their completions, are still delivered."""
        for index in sorted(self._open) if choice_index is None else [choice_index]:
            if index in self._open and index not in self._cancelled:
                self._cancelled.add(index)
                self._cancel(self, index)

    def deliver(self, choice_index: int, chunk: Chunk) -> None:
        """Queue a chunk for the reader; a reader more than `backlog` chunks behind is cancelled."""
        if choice_index not in self._open:
            return
        if chunk.completion is not None:
            self._open.discard(choice_index)
        self._waiting.append((choice_index, chunk))
        self._changed.set()
        if len(self._waiting) > self._backlog and self._error is None:
            self.fail(TooSlowError(f"the reader is {len(self._waiting)} chunks behind the engine: cancelled"))
            self.cancel()

    def fail(self, error: EyasError) -> None:
        """Raise an error in the reader once it has read the waiting chunks."""
        self._error = error
        self._changed.set()


class _EndedEngine:
    """Stands in for the engine in calls that are made after its thread has ended."""

    def __init__(self, why: str) -> None:
        self._why = why

    def submit(self, request: Request, **_: Any) -> int:  # noqa: ARG002  # the engine's signature
        raise EngineStoppedError(self._why)

    def cancel(self, index: int) -> None:
        """Do nothing: every sequence has ended with the thread."""


def _why_ended(status: Status) -> str:
    return "the engine failed" if status == "failed" else "the server is going down"


def _deliver_batch(batch: list[tuple[RequestHandle, int, Chunk]]) -> None:
    for handle, choice_index, chunk in batch:
        handle.deliver(choice_index, chunk)


def _settle(future: asyncio.Future[None], error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _call_on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    """Schedule a call on an event loop of another thread; does nothing if that loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)
