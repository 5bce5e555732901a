"""A server on a real socket, in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eyas.serve.app import create_app
from eyas.serve.context import ServeSettings
from eyas.serve.engine_thread import EngineThread
from eyas.serve.observe.metrics import Metrics
from eyas.serve.observe.observer import Observer
from eyas.serve.playground.page import Gauges
from eyas.serve.run import Server, bind


class Live:
    """A server with its address, engine and threads."""

    def __init__(
        self,
        engine: Any,
        observer: Observer | None = None,
        metrics: Metrics | None = None,
        gauges: Gauges | None = None,
        **settings: Any,
    ) -> None:
        self.settings = ServeSettings(**{"model_names": ("tiny",), **settings})
        self.engine = engine
        self.thread = EngineThread(lambda: engine, observer=observer, backlog=self.settings.backlog_chunks)
        app = create_app(self.thread, self.settings, observer, gauges, metrics)
        self.server = Server(app, self.thread, self.settings)
        listener = bind("127.0.0.1", 0)
        self.host, self.port = listener.getsockname()[:2]
        self.url = f"http://{self.host}:{self.port}"
        self._runner = threading.Thread(target=self.server.run, args=([listener],), daemon=True)

    def start(self) -> None:
        self.thread.start()
        self._runner.start()
        until = time.monotonic() + 30
        while not (self.server.started and self.thread.status == "ready"):
            assert time.monotonic() < until
            assert self._runner.is_alive(), self.thread.error
            time.sleep(0.01)

    def stop(self) -> None:
        self.thread.stop()
        self.thread.join(10)
        self.server.should_exit = self.server.force_exit = True
        self._runner.join(10)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=20)

    def idle_soon(self, seconds: float = 10.0) -> bool:
        """Whether the engine and its thread become idle within `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.thread.idle and self.engine.idle:
                return True
            time.sleep(0.01)
        return False


@contextmanager
def live(
    engine: Any,
    observer: Observer | None = None,
    metrics: Metrics | None = None,
    gauges: Gauges | None = None,
    **settings: Any,
) -> Iterator[Live]:
    """A running server."""
    made = Live(engine, observer, metrics, gauges, **settings)
    made.start()
    try:
        yield made
    finally:
        made.stop()
