"""An OpenAI-compatible server in a thread that answers, refuses and fails as a test's script says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ...http_server import Handler, Server, running


class Said(NamedTuple):
    """A response; a body that isn't bytes is sent as JSON."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = {}  # noqa: RUF012  # never changed


Script = Callable[[dict[str, Any], int], Said]
"""(request body, number of earlier requests with this chat) -> response."""


def completion(message: dict[str, Any], finish_reason: str = "stop", tokens: int = 3) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": tokens}}


def echo(body: dict[str, Any], _: int = 0) -> Said:
    """Answer with the last message and the seed."""
    return Said(body=completion({"content": f"<{body['messages'][-1]['content']}> {body['seed']}"}))


class FakeEndpoint(Server):
    def __init__(self, script: Script) -> None:
        super().__init__(_Handler)
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()

    def respond(self, body: dict[str, Any], headers: dict[str, str]) -> Said:
        with self._lock:
            before = sum(old["messages"] == body["messages"] for old in self.requests)
            self.requests.append(body)
            self.headers.append(headers)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            return self.script(body, before)
        finally:
            with self._lock:
                self._running -= 1


class _Handler(Handler):
    server: FakeEndpoint

    def do_POST(self) -> None:  # noqa: N802  # http.server's name
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        said = self.server.respond(body, dict(self.headers))
        if said.status == 0:  # hang up without a response
            self.close_connection = True
            return
        data = said.body if isinstance(said.body, bytes) else json.dumps(said.body).encode()
        self.say(said.status, data, said.headers)


def endpoint(script: Script = echo) -> AbstractContextManager[FakeEndpoint]:
    return running(FakeEndpoint(script))
