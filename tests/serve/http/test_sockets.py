"""What clients do to sockets: leave, go half, read slowly, send too much. Nobody else may notice."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ..conftest import run
from ..fakes import FakeEngine
from ..live import Live, live

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "How many?"}]
LONG = [7] * 20_000


def body(**more: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": HELLO, **more}).encode()


def head(length: int, path: str = CHAT, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


@pytest.fixture
def endless() -> Iterator[Live]:
    """A server that writes for a long time."""
    with live(
        FakeEngine(LONG, stride=8, pause=0.002, context=None),
        write_seconds=0.5,
        read_seconds=0.5,
        backlog_chunks=100_000,
    ) as made:
        yield made


def still_answers(server: Live) -> None:
    """Others are served, promptly."""
    began = time.monotonic()
    answer = httpx.post(f"{server.url}{CHAT}", content=body(max_tokens=8), headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(endless: Live, stream: bool) -> None:
    sent = body(max_tokens=20_000, stream=stream)
    with endless.connect() as client:
        client.sendall(head(len(sent)) + sent)
        if stream:
            assert client.recv(1000)
        else:
            time.sleep(0.1)
    assert endless.idle_soon()
    assert endless.engine.cancelled == [0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_half_is_gone(endless: Live, stream: bool) -> None:
    sent = body(max_tokens=20_000, stream=stream)
    with endless.connect() as client:
        client.sendall(head(len(sent)) + sent)
        client.shutdown(socket.SHUT_WR)
        assert endless.idle_soon()
    assert endless.engine.cancelled in ([0], [])


def test_a_reader_that_takes_nothing_is_cancelled_and_stalls_nobody() -> None:
    engine = FakeEngine(LONG, stride=1, pause=0.0001, context=None)
    sent = body(max_tokens=20_000, stream=True, eyas={"trace": True}, logprobs=True, top_logprobs=20)
    with live(engine, write_seconds=0.3, backlog_chunks=100_000) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((server.host, server.port))
        client.sendall(head(len(sent)) + sent)  # the answer is larger than what the kernel buffers
        still_answers(server)
        assert server.idle_soon(20)
    assert engine.cancelled == [0]


def test_a_body_that_never_comes_stalls_nobody(endless: Live) -> None:
    with endless.connect() as client:
        client.sendall(head(100) + b'{"model"')
        still_answers(endless)
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("declared", [True, False])
def test_64_megabytes_are_413(endless: Live, declared: bool) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * (1 << 20)

    content: Any = b" " * (64 << 20) if declared else chunks()
    answer = httpx.post(
        f"{endless.url}{CHAT}", content=content, headers={"content-type": "application/json"}, timeout=30
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    still_answers(endless)


def test_a_client_that_asks_first_is_told_before_it_sends(endless: Live) -> None:
    with endless.connect() as client:
        client.sendall(head(64 << 20, Expect="100-continue"))
        assert client.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        head(5) + b'{"a":1}',
        head(-1),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: \xff\xfe\r\nConnection: close\r\n\r\n",
    ],
    ids=["tls", "version", "long", "length", "negative", "header"],
)
def test_what_is_not_http_is_refused_or_dropped(endless: Live, sent: bytes) -> None:
    with endless.connect() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := client.recv(10_000):
            answer += piece
    assert not answer.startswith(b"HTTP/1.1 5")
    still_answers(endless)


def test_many_connections_side_by_side(endless: Live) -> None:
    async def ask(client: httpx.AsyncClient, index: int) -> int:
        answer = await client.post(CHAT, json={"model": "tiny", "messages": HELLO, "max_tokens": 1 + index % 9})
        return answer.status_code

    async def work() -> list[int]:
        async with httpx.AsyncClient(base_url=endless.url, timeout=20) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(60)))

    assert run(work()) == [200] * 60
    assert endless.idle_soon()
