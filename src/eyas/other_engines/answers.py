"""Answers of another engine's server, which a worker on any machine starts for itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from eyas.data.regenerate import Answerer, CompletionSettings, Connection, EndpointAnswerer, Reply
from eyas.data.regenerate.journal import Take
from eyas.data.regenerate.workers import AnswererWorker
from eyas.other_engines.program import EngineProgram


class ServerAnswerer:
    """An endpoint that a worker has started for itself: its address says nothing about the answers."""

    def __init__(self, name: str, answerer: Answerer, stop: Callable[[], object]) -> None:
        """`name` is the engine's; `stop` ends the server, which lasts as long as this object."""
        self._name, self._answerer = name, answerer
        weakref.finalize(self, stop)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the requests, and the engine in place of the address."""
        return {**self._answerer.settings, "answered_by": self._name}

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Yield replies in order of completion."""
        return self._answerer.answers(take)


@dataclass(frozen=True)
class ServerAnswererMaker:
    """Makes a worker that answers with a server of its own."""

    program: EngineProgram
    model: str
    settings: CompletionSettings
    connection: Connection

    def __call__(self) -> AnswererWorker:
        """Start the server. Raises EndpointError if it doesn't get ready."""
        server = self.program.server(self.model)
        server.__enter__()
        answerer = EndpointAnswerer(server.url, self.settings, self.connection)
        return AnswererWorker(ServerAnswerer(self.program.engine, answerer, server.__exit__))
