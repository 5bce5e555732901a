"""Lifecycle of the server process and its connections: listen, load the engine, serve, drain and exit."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
from types import FrameType
from typing import Any, Protocol

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from eyas.errors import EyasError, UsageError
from eyas.serve.context import ServeSettings
from eyas.serve.engine_thread import EngineThread
from eyas.serve.errors import ApiError, unavailable

_LINGER_SECONDS = 3
"""How long clients may take to read their last bytes after draining."""
_STEP_SECONDS = 10.0
"""How long to wait for the engine's last step at shutdown."""
_MAX_CONNECTIONS = 4096
"""Default limit on connections, if file descriptors allow it."""
_BACKLOG = 2048
"""How many connections the kernel queues until they are accepted."""
_ACCEPTED_AT_ONCE = 16
"""How many connections are accepted in a row before one of them can be closed or other tasks get a turn."""
_SPARE_FILES = 32
"""File descriptors reserved for connections that are being accepted and for everything else that opens files."""

log = logging.getLogger(__name__)


def bind(host: str, port: int, write_seconds: float = 30.0) -> socket.socket:
    """Bind a socket to listen on; port 0 takes any free port. Raises UsageError if the address can't be bound."""
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


def connection_limit(wanted: int | None) -> int:
    """Return how many connections may be open at a time: `wanted` or 4096, but no more than file descriptors allow.

    Raises UsageError if they allow none.
    """
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):  # Windows has no such limit
        return wanted or _MAX_CONNECTIONS
    room = files - used - _SPARE_FILES
    if files == resource.RLIM_INFINITY:
        return wanted or _MAX_CONNECTIONS
    if room < 1:
        raise UsageError(f"this process may open {files} files, too few for a server: raise the limit (ulimit -n)")
    if wanted is not None and wanted > room:
        log.warning("the limit of %d open files leaves room for %d connections, not %d", files, room, wanted)
    return min(wanted or _MAX_CONNECTIONS, room)


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """Return the TLS context for HTTPS, or None for HTTP.

    Raises UsageError if the given certificate and key can't be read or don't belong together.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise UsageError(f"`ssl_keyfile={key}` needs its certificate: give `ssl_certfile=`, too")
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # without an explicit password, OpenSSL would prompt for one on the terminal
        made.load_cert_chain(certificate, key, password="")
    except OSError as error:
        files = f"`ssl_certfile={certificate}`" + ("" if key is None else f" `ssl_keyfile={key}`")
        raise UsageError(
            f"{files}: give a PEM certificate and the unencrypted key that belongs to it ({error.strerror or error})"
        ) from error
    return made


def run_server(app: FastAPI, thread: EngineThread, settings: ServeSettings, listener: socket.socket) -> None:
    """Serve until a signal (SIGTERM, Ctrl-C) ends the server; raises EyasError if the engine fails.

    The thread may outlive this call: loading a model can't be interrupted, and a step may take long.
    """
    server = Server(app, thread, settings)
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


class Server(uvicorn.Server):
    """Drains before it closes: a first signal stops admission, a second one ends the process immediately."""

    def __init__(self, app: FastAPI, thread: EngineThread, settings: ServeSettings) -> None:
        waiting = WaitingConnections(connection_limit(settings.max_connections), settings.header_seconds)
        certificate = tls_context(settings)

        def connection(**given: Any) -> asyncio.Protocol:
            made = HttpConnection(waiting, **given)
            return made if certificate is None else TlsHandshake(made, waiting, certificate)

        config = uvicorn.Config(
            app,
            http=connection,  # type: ignore[arg-type]  # a factory of protocols
            ws="none",
            loop="asyncio",
            backlog=_ACCEPTED_AT_ONCE,  # asyncio accepts this many in a row
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type]  # fractions are fine
            timeout_graceful_shutdown=_LINGER_SECONDS,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=list(settings.trusted_proxies),
        )
        super().__init__(config)
        self._thread = thread
        self._settings = settings
        self._ending = False
        self._supervision: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's signature
        if self._ending:
            os._exit(0)  # immediately, because there is no state to save, and interrupted requests would fill the log
        self._ending = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_loop_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        self._supervision = asyncio.create_task(self._supervise())

    async def _supervise(self) -> None:
        """Let the server exit once the engine has ended, or once draining is over after a signal."""
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
        self._thread.stop()  # requests that still run end with an error that says so
        self.should_exit = True


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors outside of requests; errors of the operating system (too many open files) without a traceback."""
    error = context.get("exception")
    if isinstance(error, OSError):
        log.warning("%s: %s", context["message"], error.strerror or error)
    else:
        loop.default_exception_handler(context)


class WaitingConnections:
    """The open connections of a server, and those that are waiting for their client, longest wait first."""

    def __init__(self, max_connections: int, header_seconds: float) -> None:
        """`header_seconds`: how long a client may take to send a request's headers."""
        self.max_connections = max_connections
        self.header_seconds = header_seconds
        self._open: set[ClientConnection] = set()
        self._waiting: dict[ClientConnection, None] = {}

    def add(self, connection: ClientConnection) -> None:
        """Add a new connection. If that makes too many, close the one that has waited longest."""
        self._open.add(connection)
        self._waiting[connection] = None
        if len(self._open) <= self.max_connections:
            return
        oldest = next(iter(self._waiting))
        self.remove(oldest)
        if oldest is connection:
            log.warning("refused a connection: all %d allowed connections have requests running", self.max_connections)
            oldest.refuse(unavailable("too many connections have requests running: try again later"))
        else:
            log.warning(
                "closed a connection that sent no request: %d are open, which is the limit", self.max_connections
            )
            oldest.transport.abort()  # close() would wait for a client that reads nothing

    def note(self, connection: ClientConnection, waits: bool) -> None:
        """Record whether a connection is waiting for its client."""
        if not waits:
            self._waiting.pop(connection, None)
        elif connection in self._open:
            self._waiting.setdefault(connection)

    def remove(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class ClientConnection(Protocol):
    """A connection that `WaitingConnections` counts."""

    transport: asyncio.Transport

    def refuse(self, error: ApiError) -> None:
        """Close the connection, after sending this error if that is possible."""


class TlsHandshake(asyncio.Protocol):
    """A connection during its TLS handshake; it counts as one that has sent no request.

    asyncio's own TLS servers don't report a connection before its handshake is done, so those couldn't be limited.
    """

    transport: asyncio.Transport

    def __init__(self, http: HttpConnection, waiting: WaitingConnections, context: ssl.SSLContext) -> None:
        """`http` takes over the connection after the handshake."""
        self._http = http
        self._waiting = waiting
        self._context = context
        self._upgrade: asyncio.Task[None] | None = None
        self._early = b""  # data that arrives with the end of the handshake

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        # The client's bytes belong to the handshake. Soon, not now: Python 3.11.2 begins to read after this callback,
        # paused or not. What is called soon runs before the first bytes are read.
        asyncio.get_running_loop().call_soon(transport.pause_reading)
        self._waiting.add(self)
        self._upgrade = asyncio.get_running_loop().create_task(self._shake_hands())

    def refuse(self, error: ApiError) -> None:  # noqa: ARG002  # no response can be sent yet
        self.transport.abort()
        if self._upgrade is not None:
            self._upgrade.cancel()

    async def _shake_hands(self) -> None:
        try:
            encrypted = await asyncio.wait_for(self._start_tls(), self._waiting.header_seconds)
        except (OSError, asyncio.TimeoutError):  # ssl.SSLError is an OSError
            self.transport.abort()
        else:
            self._waiting.remove(self)
            if encrypted is not None and not encrypted.is_closing():
                encrypted.set_protocol(self._http)
                self._http.connection_made(encrypted)
                if self._early:
                    self._http.data_received(self._early)
        finally:
            self._waiting.remove(self)

    async def _start_tls(self) -> asyncio.Transport | None:
        if self.transport.is_closing():  # asyncio would wait for a handshake that never ends
            return None
        return await asyncio.get_running_loop().start_tls(self.transport, self, self._context, server_side=True)


class HttpConnection(H11Protocol):
    """A client's connection; it is closed when the client takes too long to send a request's headers."""

    def __init__(self, waiting: WaitingConnections, **given: Any) -> None:
        super().__init__(**given)
        self._waiting = waiting
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()
        self._waiting.add(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._stop_header_timer()
        else:  # part of the next request's headers, or the rest of a body that was answered early
            self._start_header_timer()
        self._waiting.note(self, waits=not self._answering or self.cycle.more_body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waiting.note(self, waits=not self._answering or self.cycle.more_body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._waiting.remove(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self.refuse(ApiError(400, f"this is not an HTTP/1.1 request: {msg}", code="invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Send an error, unless a response has begun already, and close the connection."""
        if self._answering:
            self.cycle.disconnected = True  # drop what its request still sends
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
            start = h11.Response(status_code=error.status, headers=list({**headers, **error.headers}.items()))
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._waiting.header_seconds, self._end_slow_header)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _end_slow_header(self) -> None:
        seconds = self._waiting.header_seconds
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self.refuse(ApiError(408, f"the headers took longer than {seconds:g} seconds", code="headers_too_slow"))
        else:
            self.transport.close()
