"""The life of a server's process: it listens, loads the engine, answers, drains on a signal and ends."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from eyas.errors import EyasError, UsageError
from eyas.serve.context import ServeSettings
from eyas.serve.engine_thread import EngineThread

_LINGER_SECONDS = 3
"""How long connections may take to read their last bytes after draining."""
_STEP_SECONDS = 10.0
"""How long the engine's last step may take."""


def bind(host: str, port: int, write_seconds: float = 30.0) -> socket.socket:
    """Bind a socket to listen on; port 0 takes any free one. UsageError if the address can't be bound."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # drop peers that acknowledge nothing; connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_seconds * 2000))
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise UsageError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def run_server(app: FastAPI, thread: EngineThread, settings: ServeSettings, listener: socket.socket) -> None:
    """Serve until a signal (SIGTERM, Ctrl-C) ends it; raises EyasError if the engine fails.

    The thread may still be alive then: loading a model can't be interrupted, and a step may take long.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_LINGER_SECONDS,
    )
    server = _Server(config, thread, settings)
    thread.start()
    try:
        server.run(sockets=[listener])
    finally:
        thread.stop()
        thread.join(_STEP_SECONDS)
    if thread.error is not None:
        if isinstance(thread.error, EyasError):
            raise thread.error
        raise EyasError(f"the engine failed: {type(thread.error).__name__}: {thread.error}") from thread.error


class _Server(uvicorn.Server):
    """Drains before it closes: a first signal stops admission, a second one ends the process at once."""

    def __init__(self, config: uvicorn.Config, thread: EngineThread, settings: ServeSettings) -> None:
        super().__init__(config)
        self._thread, self._settings = thread, settings
        self._ending = False
        self._supervision: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's signature
        if self._ending:
            self.should_exit = self.force_exit = True
        self._ending = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._supervision = asyncio.create_task(self._supervise())

    async def _supervise(self) -> None:
        """Let the server exit once the engine has ended, or draining is over after a signal."""
        while not self._ending:
            if self._thread.status in ("failed", "stopped"):
                self.should_exit = True
                return
            await asyncio.sleep(0.05)
        self._thread.drain()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.drain_seconds
        while loop.time() < until and self._thread.status == "draining" and not self._thread.idle:
            await asyncio.sleep(0.05)
        self._thread.stop()  # what still runs ends with an error that says so
        self.should_exit = True
