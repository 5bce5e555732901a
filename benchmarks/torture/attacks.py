"""Attacks of hostile clients on a server; each returns the statuses with which it was answered."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

from eyas.bench.serving.servers import ServerProcess

MIB = 1 << 20
Statuses = Counter[str]
Attack = Callable[[ServerProcess, httpx.AsyncClient], Awaitable[Statuses]]
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
)


def body(**changes: Any) -> dict[str, Any]:
    """A small completion."""
    return {"model": "m", "prompt": "def add(a, b):", "max_tokens": 8, **changes}


async def posts(http: httpx.AsyncClient, *contents: Any, path: str = "/v1/completions") -> Statuses:
    """The statuses of bodies, sent all at once; bytes go as they are."""

    async def one(content: Any) -> str:
        headers = {"Content-Type": "application/json"}
        data = content if isinstance(content, bytes) or hasattr(content, "__aiter__") else json.dumps(content)
        try:
            return str((await http.post(path, content=data, headers=headers)).status_code)
        except httpx.HTTPError as error:  # a server may cut off who doesn't stop sending
            return type(error).__name__

    return Counter(await asyncio.gather(*(one(content) for content in contents)))


async def chunks(count: int) -> AsyncIterator[bytes]:
    """A body of so many MiB whose length isn't declared."""
    yield b'{"model": "m", "prompt": "'
    for _ in range(count):
        yield b"a" * MIB
    yield b'"}'


async def huge_bodies(_: ServerProcess, http: httpx.AsyncClient) -> Statuses:
    """Bodies of 64 MiB: of declared and undeclared length, and not even JSON."""
    return await posts(http, body(prompt="a" * 64 * MIB), chunks(64), b"\x00" * 64 * MIB)


async def stop_strings(_: ServerProcess, http: httpx.AsyncClient) -> Statuses:
    """10,000 stop strings, and one of a MiB."""
    return await posts(http, body(stop=[f"stop {i}" for i in range(10_000)]), body(stop="s" * MIB))


async def broken_bodies(_: ServerProcess, http: httpx.AsyncClient) -> Statuses:
    """Invalid UTF-8, half JSON, nesting without end, lone surrogates, numbers that aren't."""
    deep = b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return await posts(
        http,
        b'{"model": "m", "prompt": "\xff\xfe\x80"}',
        b'{"model": "m", "prompt": "\xed\xa0\x80"}',
        b'{"model": "m", "prom',
        b"",
        b"null",
        deep,
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": "a", "temperature": 1e999}',
        b'{"model": "m", "prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"model": "m", "prompt": "a", "max_tokens": -1}',
        b'{"model": "m", "prompt": "a", "temperature": Infinity}',
        b'{"model": "m", "prompt": "a", "top_p": -Infinity}',
        b'{"model": "m", "prompt": "a", "max_tokens": 1e400}',
        b"[" * 5_000_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        body(prompt=[2**40]),
        body(prompt=[-1]),
        body(seed=2**64),
        body(stop_token_ids=[10**30]),
        body(logit_bias={str(i): 1e30 for i in range(100_000)}),
        body(n=10**9),
        body(unknown="field"),
    )


async def deep_values(_: ServerProcess, http: httpx.AsyncClient) -> Statuses:
    """Well-formed JSON that goes too deep where any JSON is allowed: schemas, tools, contents."""
    schema: Any = {"type": "string"}
    for _ in range(60):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}  # 2^60 once it is written out
        if len(json.dumps(schema)) > MIB:
            break
    nested = b'{"a":' * 150 + b"1" + b"}" * 150
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    return await posts(
        http,
        chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        chat | {"tools": [tool], "tool_choice": "required"},
        json.dumps(chat).encode()[:-1] + b', "response_format": ' + nested + b"}",
        chat | {"messages": [{"role": "user", "content": json.loads(nested)}]},
        chat | {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}] * 10_000}]},
        chat | {"messages": [{"role": "nobody", "content": "a"}] * 10_000},
        path="/v1/chat/completions",
    )


async def too_long(_: ServerProcess, http: httpx.AsyncClient) -> Statuses:
    """Prompts far beyond the context, in tokens and in text."""
    return await posts(http, body(prompt=[5] * 500_000), body(prompt="word " * 400_000))


async def slow_readers(server: ServerProcess, _: httpx.AsyncClient) -> Statuses:
    """Ask for long streams and read nothing."""
    sockets = [_send(server, request(body(max_tokens=400, ignore_eos=True, stream=True)), 1024) for _ in range(24)]
    await asyncio.sleep(3)
    for each in sockets:
        each.close()
    return Counter({"unread": len(sockets)})


async def half_closed(server: ServerProcess, _: httpx.AsyncClient) -> Statuses:
    """Close the sending side after a whole request, and after half of one."""
    whole = request(body(max_tokens=100, ignore_eos=True, stream=True))
    sockets = [_send(server, whole if number % 2 else whole[:-20]) for number in range(24)]
    for each in sockets:
        each.shutdown(socket.SHUT_WR)
    await asyncio.sleep(2)
    seen = Counter(_status(each) for each in sockets)
    for each in sockets:
        each.close()
    return seen


async def slow_senders(server: ServerProcess, _: httpx.AsyncClient) -> Statuses:
    """Begin headers and bodies and never go on."""
    whole = request(body())
    sockets = [_send(server, whole[: 20 if number % 2 else -5]) for number in range(64)]
    await asyncio.sleep(2)
    for each in sockets:
        each.close()
    return Counter({"unfinished": len(sockets)})


async def endless_chunks(server: ServerProcess, _: httpx.AsyncClient) -> Statuses:
    """Bodies in chunks that never end: silent, a byte now and then, and sizes that are none."""
    chunked = HEAD.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked")
    silent = [_send(server, chunked + b'9\r\n{"model":\r\n') for _ in range(16)]
    broken = [_send(server, chunked + size + b"\r\nabc") for size in (b"-5", b"zz", b"f" * 40, b"")]
    for _ in range(20):
        for each in silent:
            with suppress(OSError):  # it may hang up on us
                each.sendall(b"1\r\n \r\n")
        await asyncio.sleep(0.1)
    seen = Counter(_status(each) for each in (*broken, *silent))
    for each in (*broken, *silent):
        each.close()
    return seen


async def vanishing(server: ServerProcess, _: httpx.AsyncClient) -> Statuses:
    """Ask and hang up, again and again."""
    whole = request(body(max_tokens=400, ignore_eos=True))
    for _ in range(100):
        _send(server, whole).close()
        await asyncio.sleep(0.01)
    return Counter({"gone": 100})


async def odd_requests(server: ServerProcess, http: httpx.AsyncClient) -> Statuses:
    """Wrong methods, paths and types, keys given twice, upgrades, and lines that are no HTTP."""
    seen: Statuses = Counter()
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models"),
        ("GET", "/%00%ff/../../etc/passwd"),
        *((method, path) for method in ("HEAD", "OPTIONS", "TRACE", "BREW") for path in ("/", "/v1/completions")),
    ):
        seen[str((await http.request(method, path)).status_code)] += 1
    for kind in ({"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}, {}):
        response = await http.post("/v1/completions", content=json.dumps(body()).encode(), headers=kind)
        seen[str(response.status_code)] += 1
    seen += await posts(http, json.dumps(body()).encode()[:-1] + b', "model": "m", "max_tokens": 2}')
    upgrade = b"Connection: Upgrade\r\nUpgrade: %s\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YQ==\r\n\r\n"
    get = b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    for line in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * MIB,
        get + upgrade % b"websocket",
        get + upgrade % b"h2c",
        get + b"".join(b"X-%d: a\r\n" % number for number in range(50_000)) + b"\r\n",
        get + b"X: " + b"a" * MIB + b"\r\n\r\n",
        HEAD.replace(b"Content-Length: 2", b"Content-Length: 2\r\nTransfer-Encoding: chunked") + b"0\r\n\r\n",
        HEAD.replace(b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 3") + b"{}",
        (HEAD + b"{}") * 200,
    ):
        sent = _send(server, line)
        await asyncio.sleep(0.3)
        seen[_status(sent)] += 1
        sent.close()
    return seen


MUST_BE_REFUSED: dict[str, Attack] = {
    "64 MiB bodies": huge_bodies,
    "10k stop strings": stop_strings,
    "broken bodies": broken_bodies,
    "deep values": deep_values,
    "too long prompts": too_long,
}
MAY_BE_ANSWERED: dict[str, Attack] = {
    "slow readers": slow_readers,
    "half-closed sockets": half_closed,
    "slow senders": slow_senders,
    "endless chunks": endless_chunks,
    "vanishing clients": vanishing,
    "odd requests": odd_requests,
}


def request(content: Any) -> bytes:
    """The bytes of a POST."""
    data = json.dumps(content).encode()
    return HEAD.replace(b"Length: 2", b"Length: %d" % len(data)) + data


def _send(server: ServerProcess, data: bytes, window: int | None = None) -> socket.socket:
    made = socket.socket()
    if window is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    made.connect(("127.0.0.1", server.port))
    with suppress(OSError):  # it may hang up on us
        made.sendall(data)
    return made


def _status(sent: socket.socket) -> str:
    sent.settimeout(0.2)
    try:
        line = sent.recv(4096).split(b"\r\n")[0].split()
    except OSError as error:
        return type(error).__name__
    return line[1].decode() if len(line) > 1 else "closed"
