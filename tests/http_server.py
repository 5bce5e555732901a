"""A small HTTP server in a thread, for fakes of third-party servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class Server(ThreadingHTTPServer):
    """A server on a free port, with a thread per connection."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnect: tests do that on purpose."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def begin(self, status: int, length: int, headers: Mapping[str, str] | None = None) -> None:
        """Send the status line and the headers of a body of `length` bytes."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def say(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.begin(status, len(data), headers)
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


S = TypeVar("S", bound=Server)


@contextmanager
def running(server: S) -> Iterator[S]:
    """Run a server in a thread; it is closed at the end of the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
