"""An OpenAI-compatible server in a thread, which answers, refuses and breaks as a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Said(NamedTuple):
    """A response; a body that is not bytes is written as JSON."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = {}  # noqa: RUF012  # never changed


Script = Callable[[dict[str, Any], int], Said]
"""(request body, how often this chat has been asked before) -> response."""


def completion(message: dict[str, Any], finish_reason: str = "stop", tokens: int = 3) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": tokens}}


def echo(body: dict[str, Any], _: int = 0) -> Said:
    """Answers with what it was asked last, and the seed."""
    return Said(body=completion({"content": f"<{body['messages'][-1]['content']}> {body['seed']}"}))


class FakeEndpoint(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def respond(self, body: dict[str, Any], headers: dict[str, str]) -> Said:
        with self._lock:
            before = sum(old["messages"] == body["messages"] for old in self.asked)
            self.asked.append(body)
            self.headers.append(headers)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            return self.script(body, before)
        finally:
            with self._lock:
                self._running -= 1

    def handle_error(self, *_: Any) -> None:
        """A client that went away is part of the play."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeEndpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        said = self.server.respond(body, dict(self.headers))
        if said.status == 0:  # hang up without a word
            self.close_connection = True
            return
        data = said.body if isinstance(said.body, bytes) else json.dumps(said.body).encode()
        self.send_response(said.status)
        for name, value in {**said.headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def endpoint(script: Script = echo) -> Iterator[FakeEndpoint]:
    with FakeEndpoint(script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
