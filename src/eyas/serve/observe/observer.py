"""Observers of a server, which calls them as sequences arrive, begin and end, and at every step of the engine.

The event loop calls the hooks about requests, the engine's thread calls `stepped`, possibly at the same time. A hook
must neither block nor raise. The observers are `Metrics` (Prometheus), `Logs`, `Traces`
(OpenTelemetry) and the playground's `Gauges`.
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
class ReceivedSequence:
    """A sequence to generate: one choice of a request, with an id of its own (`ID-0`, `ID-1`, ...)."""

    id: str
    endpoint: str
    """The path of the request, such as `/v1/chat/completions`."""
    prompt_tokens: int
    max_tokens: int | None = None
    temperature: float = 0.0
    stream: bool = False
    speculate: bool = True
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    seed: int = 0
    received: float = field(default_factory=time.monotonic)
    """When its request arrived (`time.monotonic`)."""
    trace_headers: tuple[tuple[str, str], ...] = ()
    """Names and values of the request's headers that say whose trace it belongs to (W3C Trace Context)."""


@dataclass(frozen=True)
class FinishedSequence:
    """How a sequence ended. Seconds are wall time since its request was received."""

    sequence: ReceivedSequence
    reason: str
    """`stop`, `length`, `cancelled`, `deadline` or `error`."""
    stats: Stats
    """The engine's statistics; only the number of tokens if the request ended before the engine reported them."""
    seconds: float
    first_token_seconds: float | None
    """None if the sequence ended without a token."""

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per token after the first (TPOT); None with fewer than two tokens."""
        if self.first_token_seconds is None or self.stats.tokens < 2:
            return None
        return (self.seconds - self.first_token_seconds) / (self.stats.tokens - 1)


class Observer:
    """The hooks of an observer, which do nothing; subclasses override those they need."""

    def request_received(self, sequence: ReceivedSequence) -> None:
        """A sequence was handed to the engine."""

    def first_token(self, sequence: ReceivedSequence, seconds: float) -> None:
        """Its first tokens came `seconds` after its request was received."""

    def more_tokens(self, sequence: ReceivedSequence, count: int, seconds: float) -> None:
        """`count` more tokens came, `seconds` after the previous ones."""

    def finished(self, finished: FinishedSequence) -> None:
        """A sequence ended, for whatever reason."""

    def refused(self, endpoint: str, status: int, code: str, path: str) -> None:
        """A request was answered with an error: HTTP status and the `code` (or `type`) of the error's body.

        `endpoint` is "" if the requested `path` isn't an endpoint.
        """

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        """The engine made a step; `outcome` is its decoding round, None if no sequence was decoding."""


class Observers(Observer):
    """Several observers as one; each hook calls its counterparts in order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.members = tuple(observers)

    def request_received(self, sequence: ReceivedSequence) -> None:
        for member in self.members:
            member.request_received(sequence)

    def first_token(self, sequence: ReceivedSequence, seconds: float) -> None:
        for member in self.members:
            member.first_token(sequence, seconds)

    def more_tokens(self, sequence: ReceivedSequence, count: int, seconds: float) -> None:
        for member in self.members:
            member.more_tokens(sequence, count, seconds)

    def finished(self, finished: FinishedSequence) -> None:
        for member in self.members:
            member.finished(finished)

    def refused(self, endpoint: str, status: int, code: str, path: str) -> None:
        for member in self.members:
            member.refused(endpoint, status, code, path)

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        for member in self.members:
            member.stepped(state, controller, outcome)


@dataclass
class SequenceClock:
    """Times one sequence and reports to the observer. Make it when the sequence is handed to the engine.

    Call `add` for every chunk, and `end` if no chunk had a completion; a second `end` does nothing.
    """

    observer: Observer
    sequence: ReceivedSequence
    received: float = field(default_factory=lambda: time.monotonic())
    """When its request was received (`time.monotonic`)."""
    _tokens: int = 0
    _last: float | None = None
    _first_seconds: float | None = None
    _ended: bool = False

    def __post_init__(self) -> None:
        self.observer.request_received(self.sequence)

    def add(self, chunk: Chunk) -> None:
        """Report the tokens of a chunk, and the end of the sequence if it has the completion."""
        if chunk.token_ids:
            now = time.monotonic()
            if self._last is None:
                self._first_seconds = now - self.received
                self.observer.first_token(self.sequence, self._first_seconds)
            else:
                self.observer.more_tokens(self.sequence, len(chunk.token_ids), now - self._last)
            self._last = now
            self._tokens += len(chunk.token_ids)
        if chunk.completion is not None:
            self.end(chunk.completion.finish_reason, chunk.completion.stats)

    def end(self, reason: str, stats: Stats | None = None) -> None:
        """Report the end of the sequence; without the engine's `stats`, the tokens of its chunks are counted."""
        if self._ended:
            return
        self._ended = True
        seconds = time.monotonic() - self.received
        stats = stats or Stats(tokens=self._tokens)
        self.observer.finished(FinishedSequence(self.sequence, reason, stats, seconds, self._first_seconds))
