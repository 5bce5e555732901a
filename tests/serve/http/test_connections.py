"""Connections that say nothing, or too little, are closed; they never keep others out, and never flood the log."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from eyas.errors import UsageError
from eyas.serve.observe.observer import Observer
from eyas.serve.run import connection_limit

from ...pairs import Pair
from ..fakes import FakeEngine
from ..live import Live, live
from .test_process import process
from .test_sockets import CHAT, body, head

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-"


def ended(client: socket.socket, within: float = 5.0) -> tuple[bytes, float]:
    """What a connection says until the server closes it, and how long that takes."""
    client.settimeout(within)
    began = time.monotonic()
    answer = b""
    try:
        while piece := client.recv(10_000):
            answer += piece
    except ConnectionResetError:
        pass
    return answer, time.monotonic() - began


def answered(client: socket.socket) -> bytes:
    """The next answer, which is a JSON object without a line break."""
    answer = b""
    while not answer.endswith(b"}"):
        answer += (piece := client.recv(10_000))
        assert piece, answer
    return answer


def drips_until_it_is_closed(client: socket.socket) -> bool:
    """Send a byte now and then, for seconds; whether the server has closed the connection meanwhile."""
    for _ in range(200):
        try:
            client.sendall(b" ")
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def quick() -> Iterator[Live]:
    """A server that waits half a second for headers, and a fifth for the next request."""
    with live(FakeEngine(), header_seconds=0.5, idle_seconds=0.2) as made:
        yield made


def test_a_connection_that_says_nothing_is_closed(quick: Live) -> None:
    with quick.connect() as client:
        answer, seconds = ended(client)
    assert answer == b""
    assert seconds > 0.4


def test_half_a_header_is_told_and_closed_however_it_drips(quick: Live) -> None:
    with quick.connect() as client:
        for byte in HALF[:8]:
            client.sendall(bytes([byte]))
            time.sleep(0.02)
        answer, _ = ended(client)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"headers_too_slow" in answer


def test_a_connection_is_kept_for_the_next_request_but_not_for_long(quick: Live) -> None:
    with quick.connect() as client:
        for _ in range(2):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answered(client).startswith(b"HTTP/1.1 200")
        answer, seconds = ended(client)
    assert answer == b""
    assert seconds > 0.15


def test_the_rest_of_a_body_that_was_refused_keeps_no_connection_open() -> None:
    with (
        live(FakeEngine(), api_keys=("key",), header_seconds=0.3, idle_seconds=0.3) as server,
        server.connect() as client,
    ):
        client.sendall(head(1000) + b"{")
        assert answered(client).startswith(b"HTTP/1.1 401")
        assert drips_until_it_is_closed(client)


def test_where_there_are_too_many_the_one_that_waited_longest_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.go.clear()
    with caplog.at_level(logging.WARNING), ExitStack() as stack, live(engine, max_connections=4) as server:
        try:
            asking = [stack.enter_context(server.connect()) for _ in range(2)]
            for client in asking:
                client.sendall(head(len(body())) + body())
            uploading = stack.enter_context(server.connect())
            uploading.sendall(head(1000) + b"{")
            time.sleep(0.2)
            assert httpx.get(f"{server.url}/health").status_code == 200
            idle = stack.enter_context(server.connect())
            time.sleep(0.1)
            last = stack.enter_context(server.connect())
            assert ended(uploading)[0] == b""  # the oldest that waits for its client
            last.sendall(head(len(body())) + body())
            time.sleep(0.1)
            idle.sendall(head(len(body())) + body())
            time.sleep(0.2)
            with server.connect() as refused:
                answer, _ = ended(refused)
            assert answer.startswith(b"HTTP/1.1 503")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
        finally:
            engine.go.set()
        for client in (*asking, idle, last):
            assert answered(client).startswith(b"HTTP/1.1 200")
    assert "which is the limit" in caplog.text
    assert "Traceback" not in caplog.text


def test_what_is_no_http_gets_json() -> None:
    with live(FakeEngine()) as server, server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n")
        answer, _ = ended(client)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_a_body_that_breaks_off_is_the_clients_fault(caplog: pytest.LogCaptureFixture) -> None:
    class Refusals(Observer):
        def __init__(self) -> None:
            self.seen: list[tuple[int, str]] = []

        def refused(self, endpoint: str, status: int, code: str, path: str) -> None:  # noqa: ARG002
            self.seen.append((status, code))

    broken = [
        head(1000) + b'{"model"',
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"mod\r\nnot a length\r\n',
    ]
    observer = Refusals()
    with caplog.at_level(logging.INFO), live(FakeEngine(), observer) as server:
        for sent in broken:
            with server.connect() as client:
                client.sendall(sent)
                time.sleep(0.1)
        until = time.monotonic() + 5
        while len(observer.seen) < len(broken) and time.monotonic() < until:
            time.sleep(0.01)
    assert observer.seen == [(499, "client_gone")] * 2
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_the_limit_follows_from_file_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resource = pytest.importorskip("resource")
    assert connection_limit(3) == 3
    monkeypatch.setattr("os.listdir", lambda _: ["0"] * 8)
    for files, wanted, most in ((64, None, 24), (64, 20, 20), (64, 50, 24), (10**6, None, 4096), (10**6, 9999, 9999)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connection_limit(wanted) == most
    assert "leaves room for 24 connections, not 50" in caplog.text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    with pytest.raises(UsageError, match="too few for a server"):
        connection_limit(None)


WITH_64_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from eyas.cli.app import main
main()
"""


def test_with_64_file_descriptors_90_idle_connections_stop_nobody(pair: Pair, tmp_path: Path) -> None:
    options = ("--model", pair.model, "--log-format", "json")
    with process(*options, log=tmp_path / "log", program=("-c", WITH_64_FILES)) as server, ExitStack() as stack:
        server.ready()
        host, port = server.url.removeprefix("http://").split(":")
        for number in range(90):
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            if number % 2:
                client.sendall(HALF)
        began = time.monotonic()
        for _ in range(2):
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
            assert server.complete(4).status_code == 200
        took = time.monotonic() - began
        lines = [json.loads(line) for line in server.said.splitlines()]  # every one of them
    assert len(lines) < 30 + 10 * took
    assert not [line for line in lines if line["level"] == "error"]
