"""An engine that only streams, stepped one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eyas.engine import Engine
from eyas.types import Chunk, Completion, Request, Stats


class SteppingEngine:
    """`submit`, `cancel` and `step` over `Engine.stream_from`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokenizer, self.target = engine.tokenizer, engine.target
        self._waiting: list[tuple[int, Request]] = []
        self._order: list[int] = []
        self._open: set[int] = set()
        self._count = 0
        self._running: Iterator[Chunk] | None = None
        self._cancelled: list[int] = []

    def submit(self, request: Request, *, deadline: float | None = None, queue_key: str = "") -> int:  # noqa: ARG002
        self._engine.check(request)
        self._count += 1
        self._waiting.append((self._count, request))
        self._open.add(self._count)
        return self._count

    def cancel(self, index: int) -> None:
        if index in self._open:
            self._waiting = [entry for entry in self._waiting if entry[0] != index]
            self._open.discard(index)
            self._cancelled.append(index)

    @property
    def idle(self) -> bool:
        return not self._open and not self._cancelled

    def state(self) -> Any:
        return None

    def step(self) -> list[Chunk]:
        found = [Chunk(i, (), 0, Completion("", [], "", "cancelled", Stats())) for i in self._cancelled]
        self._cancelled = []
        if not self._open:
            return found
        if self._running is None:
            self._order = []
            self._running = self._engine.stream_from(self._take)
        chunk = next(self._running, None)
        if chunk is None:
            self._running = None
            return found
        index = self._order[chunk.index]
        if index not in self._open:
            return found
        if chunk.completion is not None:
            self._open.discard(index)
        return [*found, Chunk(index, chunk.token_ids, chunk.accepted, chunk.completion)]

    def _take(self, room: int) -> list[Request]:
        taken, self._waiting = self._waiting[:room], self._waiting[room:]
        self._order += [index for index, _ in taken]
        return [request for _, request in taken]
