"""Thousands of connections that say nothing, or half a header, beside polite clients: none of these may be slower.

    python -m benchmarks.torture.serve_idle [--idle 2000] [--polite 16] [--rounds 6] [--requests 12] [--most 1.2]
        [--output F.json] [-- options of eyas serve]

Rounds alternate between the polite clients alone and beside the idle connections, which a process of its own holds open
and opens again when the server closes them. Fails if a polite client's median time for an answer is more than `--most`
times its median alone, if it gets anything but 200, if `/health` takes a second, or if a traceback is in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median

import httpx

from benchmarks.torture.attacks import body
from benchmarks.torture.verdict import conclude
from eyas.bench.serving.servers import ServerProcess, eyas_server

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-"


async def hold_open(port: int, count: int, opened: Synchronized[int]) -> None:
    """Keep so many connections open for ever, every second one with half a header; counts how many were opened."""

    async def one(number: int) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                opened.value += 1
                if number % 2:
                    writer.write(HALF)
                await reader.read()  # until the server closes it
                writer.close()
            await asyncio.sleep(1.0)

    await asyncio.gather(*map(one, range(count)))


def _hold_open(port: int, count: int, opened: Synchronized[int]) -> None:
    asyncio.run(hold_open(port, count, opened))


@contextmanager
def idle_connections(port: int, count: int) -> Iterator[Synchronized[int]]:
    """So many idle connections, held by another process; yields how often one was opened."""
    context = get_context("spawn")
    opened: Synchronized[int] = context.Value("i", 0)
    process = context.Process(target=_hold_open, args=(port, count, opened), daemon=True)
    process.start()
    try:
        until = time.monotonic() + 60
        while opened.value < count and time.monotonic() < until:
            time.sleep(0.05)
        yield opened
    finally:
        process.kill()
        process.join()


async def ask_politely(server: ServerProcess, clients: int, requests: int) -> list[list[float]]:
    """The seconds of each client's answers; every client has a connection of its own and asks one after the other."""

    async def one(number: int) -> list[float]:
        taken = []
        async with httpx.AsyncClient(base_url=server.root, timeout=120, trust_env=False) as http:
            for _ in range(requests):
                began = time.monotonic()
                (await http.post("/v1/completions", json=body(seed=number))).raise_for_status()
                taken.append(time.monotonic() - began)
        return taken

    return await asyncio.gather(*map(one, range(clients)))


def health_seconds(server: ServerProcess) -> float:
    """How long `/health` takes on a new connection."""
    began = time.monotonic()
    httpx.get(f"{server.root}/health", timeout=30, trust_env=False).raise_for_status()
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--polite", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=12, help="of each polite client in a round")
    parser.add_argument("--most", type=float, default=1.2, help="how many times slower a polite client may be")
    parser.add_argument("--output", type=Path)
    parser.add_argument("serve", nargs="*", default=["--model", "demo", "--draft-model", "demo"])
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for the server and the idle connections as well
    alone: list[list[float]] = [[] for _ in range(options.polite)]
    beside: list[list[float]] = [[] for _ in range(options.polite)]
    health, opened = [], 0

    def ask(found: list[list[float]]) -> None:
        for mine, taken in zip(found, asyncio.run(ask_politely(server, options.polite, options.requests)), strict=True):
            mine += taken

    with eyas_server("idle", [*options.serve, "--served-model-name", "m"]) as server:
        asyncio.run(ask_politely(server, options.polite, 2))
        for _ in range(options.rounds):
            ask(alone)
            with idle_connections(server.port, options.idle) as count:
                health.append(health_seconds(server))
                ask(beside)
                health.append(health_seconds(server))
                opened += count.value
        log = server.log_tail(10**6)
    slower = [median(with_idle) / median(without) for with_idle, without in zip(beside, alone, strict=True)]
    findings = {
        "idle": options.idle,
        "polite": options.polite,
        "answers": options.rounds * options.requests * options.polite,
        "idle_connections_opened": opened,
        "median_seconds_alone": round(median(chain(*alone)), 4),
        "median_seconds_beside": round(median(chain(*beside)), 4),
        "slower_worst": round(max(slower), 3),
        "slower_median": round(median(slower), 3),
        "health_seconds_worst": round(max(health), 3),
    }
    held = {
        f"no polite client is {options.most:g} times slower": max(slower) <= options.most,
        "health answers within a second": max(health) < 1.0,
        "all idle connections were opened": opened >= options.rounds * options.idle,
        "no traceback": "Traceback" not in log,
    }
    conclude(findings, held, options.output)


if __name__ == "__main__":
    main()
