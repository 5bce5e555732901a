"""What a server tells whoever watches it: requests as they come, start and end, and every step of the engine.

The API calls the request hooks on its event loop, the engine's thread calls `stepped`: an observer must stand both at
once, may not block, and may not raise. `Metrics` (Prometheus), `Logs` and the playground's `Gauges` are there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eyas.types import Chunk, Stats

if TYPE_CHECKING:
    from eyas.engine.controller import ControllerState
    from eyas.engine.round import RoundOutput
    from eyas.types import EngineState


@dataclass(frozen=True)
class Received:
    """One sequence that was asked for. Of a request's `n` choices each is one, with an id of its own (`ID-0`, ...)."""

    id: str
    endpoint: str
    """The path, such as `/v1/chat/completions`."""
    prompt_tokens: int
    max_tokens: int | None = None
    temperature: float = 0.0
    stream: bool = False
    speculate: bool = True


@dataclass(frozen=True)
class Finished:
    """How a sequence ended. Seconds are wall time since it was received."""

    request: Received
    reason: str
    """`stop`, `length`, `cancelled`, `deadline` or `error`."""
    stats: Stats
    seconds: float
    first_token_seconds: float | None
    """None if it ended without a token."""

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a token after the first round (TPOT); None where nothing came after it."""
        if self.first_token_seconds is None or self.stats.tokens < 2:
            return None
        return (self.seconds - self.first_token_seconds) / (self.stats.tokens - 1)


class Observer:
    """The hooks. Inherit from it and write those that you need; the others do nothing."""

    def request_received(self, request: Received) -> None:
        """A sequence was accepted and is handed to the engine."""

    def first_token(self, request: Received, seconds: float) -> None:
        """Its first token is there, so many seconds after it was received."""

    def more_tokens(self, request: Received, count: int, seconds: float) -> None:
        """`count` more, so many seconds after those before."""

    def finished(self, finished: Finished) -> None:
        """It ended, in whatever way."""

    def refused(self, endpoint: str, status: int, code: str) -> None:
        """A request was answered with an error: HTTP status and the `code` (or `type`) of the error's body."""

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        """The engine made a step; `outcome` is its decoding round, None if no row was running."""


class Observers(Observer):
    """Several as one, in their order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.members = tuple(observers)

    def request_received(self, request: Received) -> None:
        for member in self.members:
            member.request_received(request)

    def first_token(self, request: Received, seconds: float) -> None:
        for member in self.members:
            member.first_token(request, seconds)

    def more_tokens(self, request: Received, count: int, seconds: float) -> None:
        for member in self.members:
            member.more_tokens(request, count, seconds)

    def finished(self, finished: Finished) -> None:
        for member in self.members:
            member.finished(finished)

    def refused(self, endpoint: str, status: int, code: str) -> None:
        for member in self.members:
            member.refused(endpoint, status, code)

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        for member in self.members:
            member.stepped(state, controller, outcome)


@dataclass
class Watch:
    """One sequence on its way: keeps the time and tells the observer. Make it when the sequence is handed over.

    watch = Watch(observer, Received(...))
    async for chunk in ...: watch.add(chunk)
    watch.end("cancelled")  # only if no chunk brought a completion; a second end is nothing
    """

    observer: Observer
    request: Received
    began: float = field(default_factory=lambda: time.monotonic())
    """When it was asked for (`time.monotonic`)."""
    _last: float | None = None
    _first_seconds: float | None = None
    _ended: bool = False

    def __post_init__(self) -> None:
        self.observer.request_received(self.request)

    def add(self, chunk: Chunk) -> None:
        """What a round added to it."""
        if chunk.token_ids:
            now = time.monotonic()
            if self._last is None:
                self._first_seconds = now - self.began
                self.observer.first_token(self.request, self._first_seconds)
            else:
                self.observer.more_tokens(self.request, len(chunk.token_ids), now - self._last)
            self._last = now
        if chunk.completion is not None:
            self.end(chunk.completion.finish_reason, chunk.completion.stats)

    def end(self, reason: str, stats: Stats | None = None) -> None:
        """It ended; without statistics where the engine had none to give."""
        if self._ended:
            return
        self._ended = True
        seconds = time.monotonic() - self.began
        self.observer.finished(Finished(self.request, reason, stats or Stats(), seconds, self._first_seconds))
