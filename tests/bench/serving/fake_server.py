"""An OpenAI-compatible server in a thread that streams what a test's script returns."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...http_server import Handler, Server, running

Script = Callable[[dict[str, Any]], Sequence[bytes] | int]
"""Request body -> pieces of the stream, or the status of a refusal (0 = hang up)."""


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def stream(words: Sequence[str], **last: Any) -> list[bytes]:
    """A streamed chat: a role, the words, usage (two tokens per word) with the fields of `last`, and the end."""
    chunks = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
    usage = {"prompt_tokens": 5, "completion_tokens": 2 * len(words), **last.pop("usage", {})}
    return [event(chunk) for chunk in chunks] + [event({"choices": [], "usage": usage, **last}), event(b"[DONE]")]


class FakeServer(Server):
    def __init__(self, script: Script, metrics: str, pause: float) -> None:
        super().__init__(_Handler)
        self.script = script
        self.metrics = metrics
        self.pause = pause
        self.info = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()


class _Handler(Handler):
    server: FakeServer

    def do_GET(self) -> None:  # noqa: N802  # http.server's name
        known = {"/v1/models": json.dumps({"data": [{"id": "fake"}]}), "/metrics": self.server.metrics, "/health": "{}"}
        text = (known | {"/get_server_info": self.server.info}).get(self.path, "")
        self.say(200 if text else 404, text.encode())

    def do_POST(self) -> None:  # noqa: N802  # http.server's name
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body))
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        try:
            pieces = self.server.script(body)
            if pieces == 0:
                self.close_connection = True
            elif isinstance(pieces, int):
                self.say(pieces, b'{"error": {"message": "no"}}')
            else:
                self.begin(200, sum(map(len, pieces)))
                for piece in pieces:
                    time.sleep(self.server.pause)
                    self.wfile.write(piece)
        finally:
            with self.server.lock:
                self.server.at_once -= 1


def serving(script: Script, metrics: str = "", pause: float = 0.0) -> AbstractContextManager[FakeServer]:
    return running(FakeServer(script, metrics, pause))
