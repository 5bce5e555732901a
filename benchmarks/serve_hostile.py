"""Hostile clients beside a well-behaved one: no 5xx, clear 4xx, no stall of others.

    python benchmarks/serve_hostile.py [--seconds 5] [--output FILE.json] [-- options of eyas serve]

The well-behaved client asks for short answers one after the other, first alone, then for as long as each attack lasts;
its slowest answer under attack is set against its slowest alone. Fails if any answer to anybody is a 5xx, if an attack
that must be refused isn't, or if a well-behaved answer takes longer than `--patience` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from serving import conclude

from eyas.bench.serve_process import ServerProcess, eyas_server

MIB = 1 << 20
Statuses = Counter[str]
Attack = Callable[[ServerProcess, httpx.AsyncClient], Awaitable[Statuses]]


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
    """64 MiB: declared, undeclared, not even JSON."""
    return await posts(http, body(prompt="a" * 64 * MIB), chunks(64), b"\x00" * 64 * MIB)


async def stop_strings(_: ServerProcess, http: httpx.AsyncClient) -> Statuses:
    """10,000 of them, and one of a MiB."""
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
        body(prompt=[2**40]),
        body(prompt=[-1]),
        body(logit_bias={str(i): 1e30 for i in range(100_000)}),
        body(n=10**9),
        body(unknown="field"),
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


async def vanishing(server: ServerProcess, _: httpx.AsyncClient) -> Statuses:
    """Ask and hang up, again and again."""
    whole = request(body(max_tokens=400, ignore_eos=True))
    for _ in range(100):
        _send(server, whole).close()
        await asyncio.sleep(0.01)
    return Counter({"gone": 100})


async def odd_requests(server: ServerProcess, http: httpx.AsyncClient) -> Statuses:
    """Wrong methods, paths, types and lines that are no HTTP."""
    seen: Statuses = Counter()
    for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("GET", "/%00%ff/../../etc/passwd")):
        seen[str((await http.request(method, path)).status_code)] += 1
    said = await http.post("/v1/completions", content=json.dumps(body()), headers={"Content-Type": "text/plain"})
    seen[str(said.status_code)] += 1
    for line in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"A" * MIB):
        sent = _send(server, line)
        await asyncio.sleep(0.3)
        seen[_status(sent)] += 1
        sent.close()
    return seen


MUST_BE_REFUSED: dict[str, Attack] = {
    "64 MiB bodies": huge_bodies,
    "10k stop strings": stop_strings,
    "broken bodies": broken_bodies,
    "too long prompts": too_long,
}
MAY_BE_ANSWERED: dict[str, Attack] = {
    "slow readers": slow_readers,
    "half-closed sockets": half_closed,
    "slow senders": slow_senders,
    "vanishing clients": vanishing,
    "odd requests": odd_requests,
}


def request(content: Any) -> bytes:
    """The bytes of a POST."""
    data = json.dumps(content).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    return "\r\n".join((*head, "", "")).encode() + data


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


async def behave(http: httpx.AsyncClient, until: Callable[[], bool]) -> list[float]:
    """Ask, wait, ask again; the seconds each answer took. Raises on anything but 200."""
    taken = []
    while not until() or len(taken) < 2:
        began = time.monotonic()
        (await http.post("/v1/completions", json=body())).raise_for_status()
        taken.append(time.monotonic() - began)
    return taken


async def attack_all(server: ServerProcess, seconds: float) -> dict[str, Any]:
    """Every attack, with the well-behaved client beside it."""
    limits = httpx.Limits(max_connections=None)
    results: dict[str, Any] = {}
    async with (
        httpx.AsyncClient(base_url=server.root, timeout=120, limits=limits) as hostile,
        httpx.AsyncClient(base_url=server.root, timeout=120) as polite,
    ):
        await behave(polite, lambda: True)
        end = time.monotonic() + seconds
        alone = await behave(polite, lambda: time.monotonic() > end)
        results["alone"] = {"answers": len(alone), "slowest_seconds": round(max(alone), 3)}
        for name, attack in (MUST_BE_REFUSED | MAY_BE_ANSWERED).items():
            running = asyncio.ensure_future(attack(server, hostile))
            taken = await behave(polite, running.done)
            results[name] = {
                "statuses": dict(await running),
                "answers": len(taken),
                "slowest_seconds": round(max(taken), 3),
            }
        results["afterwards"] = {"slowest_seconds": round(max(await behave(polite, lambda: True)), 3)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--patience", type=float, default=5.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("serve", nargs="*", default=["--model", "demo", "--draft-model", "demo"])
    options = parser.parse_args()
    with eyas_server("hostile", [*options.serve, "--served-model-name", "m"]) as server:
        results = asyncio.run(attack_all(server, options.seconds))
    statuses = {name: result.get("statuses", {}) for name, result in results.items()}
    slowest = max(result["slowest_seconds"] for result in results.values())
    held = {
        "no 5xx": not any(status.startswith("5") for seen in statuses.values() for status in seen),
        "what must be refused is": not any(
            status.startswith("2") for name in MUST_BE_REFUSED for status in statuses[name]
        ),
        f"nobody waits {options.patience:g} s": slowest < options.patience,
    }
    conclude({"attacks": results}, held, options.output)


if __name__ == "__main__":
    main()
