"""A polite client's latency next to a greedy client that stays within the protocol.

    python -m benchmarks.torture.serve_fair [--seconds 6] [--output FILE.json] [-- options of eyas serve]

Both have an API key. The polite client keeps asking for 8 tokens, first alone, then during each attack. Fails if its
median during an attack exceeds `--most` times its median alone, if any answer takes more than `--worst` seconds, or if
the server's log has a traceback, which is printed.
The greedy client is a separate process of the lowest priority: it stands for another machine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from statistics import median
from typing import Annotated, Any

import httpx

from benchmarks.harness import Output, report, script
from eyas.bench.serving.servers import ServerProcess, eyas_server
from tests.toy.pair import TOY_PAIR

GREEDY = "greedy"
POLITE = "polite"
TRACEBACK = "Traceback (most recent call last)"
Ask = Callable[[int], tuple[str, bytes]]
SILENT_HEAD = (
    b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 999999999\r\n\r\n"
)
LONG, TEXT = [9] * 1900, "b c " * 1_700_000
HELLO = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": TEXT})}}
TOOL = {"type": "function", "function": {"name": "f", "description": TEXT}}


def body(**changes: Any) -> dict[str, Any]:
    """A small completion."""
    return {"model": "m", "prompt": "def add(a, b):", "max_tokens": 8, **changes}


def _encoded(content: dict[str, Any]) -> tuple[str, bytes]:
    path = "/v1/chat/completions" if "messages" in content else "/v1/completions"
    return path, json.dumps(content).encode()


def _always(content: dict[str, Any]) -> Ask:
    """The same body every time, encoded once to spare CPU time."""
    made = _encoded(content)
    return lambda _: made


def _many_users(number: int) -> tuple[str, bytes]:
    return _encoded(body(user=str(number), max_tokens=64, ignore_eos=True))


def _ever_longer(number: int) -> tuple[str, bytes]:
    """64 long answers that keep their slots, then prompts that need wider slots."""
    short = body(prompt=LONG[:500], max_tokens=800, ignore_eos=True)
    return _encoded(short if number < 64 else body(prompt=LONG, max_tokens=16))


ATTACKS: dict[str, tuple[int, Ask]] = {
    "64 answers to one long prompt": (2, _always(body(prompt=LONG, n=64, max_tokens=16))),
    "100 times the same long prompt": (100, _always(body(prompt=LONG, max_tokens=16))),
    "long prompts behind many short ones": (100, _ever_longer),
    "tool arguments of 7 MB": (
        8,
        _always({"model": "m", "messages": [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}),
    ),
    "a tool's description of 7 MB": (8, _always({"model": "m", "messages": [HELLO], "tools": [TOOL]})),
    "long texts": (32, _always(body(prompt=TEXT[:100_000]))),
    "many bad words": (32, _always(body(bad_words=[f"{number} " + TEXT[:240] for number in range(256)]))),
    "1,400 users": (1400, _many_users),
    "70 ordinary requests": (70, _always(body(max_tokens=400, ignore_eos=True))),
    "an ambiguous grammar": (
        16,
        _always(body(max_tokens=400, guided_grammar='start: e\ne: e e | e "+" e | "a" | "b"')),
    ),
    "48 prompts, prompt_logprobs 20": (2, _always(body(prompt=[LONG[:500]] * 48, max_tokens=1, prompt_logprobs=20))),
}
"""Attack -> number of concurrent requests, and a function that makes the path and body of the nth."""
SILENT = "bodies above the limit"


async def flood(root: str, width: int, ask: Ask, statuses: Counter[str]) -> None:
    """Keep `width` requests running until canceled."""
    numbers = count()
    json_body = {"Content-Type": "application/json"}

    async def one(http: httpx.AsyncClient) -> None:
        while True:
            path, content = ask(next(numbers))
            try:
                status = str((await http.post(path, content=content, headers=json_body)).status_code)
            except httpx.HTTPError as error:
                status = type(error).__name__
            statuses[status] += 1
            if status != "200":
                await asyncio.sleep(0.2)

    clients = [_client(root, GREEDY) for _ in range(-(-width // 32))]  # a pool of many connections is slow
    await asyncio.gather(*(one(clients[number % len(clients)]) for number in range(width)))


async def silent_bodies(root: str, statuses: Counter[str]) -> None:
    """Keep 64 connections that announce a body above the limit and send none of it, until canceled."""
    port = httpx.URL(root).port

    async def one() -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(SILENT_HEAD)
            began = time.monotonic()
            with suppress(OSError):
                await reader.read()
            writer.close()
            statuses["ended within 30 s" if time.monotonic() - began < 30 else "kept open"] += 1

    await asyncio.gather(*(one() for _ in range(64)))


def _attack(root: str, name: str, begun: Any, ending: Any, found: Any) -> None:
    """The greedy client's process: attack until `ending` is set, then put the statuses into `found`."""
    os.nice(19)
    begun.set()

    async def attack() -> Counter[str]:
        statuses: Counter[str] = Counter()
        running = silent_bodies(root, statuses) if name == SILENT else flood(root, *ATTACKS[name], statuses)
        task = asyncio.ensure_future(running)
        await asyncio.to_thread(ending.wait)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return statuses

    found.put(asyncio.run(attack()))


@contextmanager
def attacked(root: str, name: str, statuses: Counter[str]) -> Iterator[None]:
    """Attack the server during the block; afterwards `statuses` counts the attacker's responses."""
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    ending = spawn.Event()
    found = spawn.SimpleQueue()
    process = spawn.Process(target=_attack, args=(root, name, begun, ending, found), daemon=True)
    process.start()
    begun.wait()
    try:
        yield
    finally:
        ending.set()
        statuses.update(found.get())
        process.join()


async def behave(http: httpx.AsyncClient, seconds: float) -> list[float]:
    """The polite client: the seconds of each answer of 8 tokens. Raises on any status but 200."""
    taken: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken) < 5:
        began = time.monotonic()
        (await http.post("/v1/completions", json=body(seed=len(taken), temperature=0.8))).raise_for_status()
        taken.append(time.monotonic() - began)
        await asyncio.sleep(0.02)
    return taken


def _client(root: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=root, timeout=120, limits=limits, headers=headers, trust_env=False)


async def attack_all(server: ServerProcess, seconds: float, only: str) -> dict[str, Any]:
    """The times of the polite client's answers, alone and during each attack."""
    results: dict[str, Any] = {}

    def note(name: str, taken: list[float], statuses: Counter[str]) -> None:
        results[name] = {
            "answers": len(taken),
            "median_seconds": round(median(taken), 4),
            "worst_seconds": round(max(taken), 3),
            "statuses": dict(statuses),
        }
        print(name, results[name], flush=True)

    async with _client(server.root, POLITE) as polite:
        await behave(polite, 1.0)
        note("alone", await behave(polite, seconds), Counter())
        for name in (*ATTACKS, SILENT):
            if only not in name:
                continue
            statuses: Counter[str] = Counter()
            with attacked(server.root, name, statuses):
                taken = await behave(polite, seconds)
            note(name, taken, statuses)
            while httpx.get(f"{server.root}/load").json()["server_load"]:
                await asyncio.sleep(0.1)
    return results


@script
def main(
    serve: Annotated[Sequence[str], "options of eyas serve"] = TOY_PAIR,
    *,
    seconds: Annotated[float, "how long the polite client asks during each attack"] = 6.0,
    most: float = 3.0,
    worst: float = 1.0,
    only: Annotated[str, "only attacks with this in their name"] = "",
    output: Output = None,
) -> int:
    keys = ["--api-key", GREEDY, "--api-key", POLITE]
    with eyas_server("fair", [*serve, *keys, "--served-model-name", "m"]) as server:
        try:
            results = asyncio.run(attack_all(server, seconds, only))
        finally:
            log = server.log_tail(10**6)
            if TRACEBACK in log:
                print("the server's log:", log[max(0, log.index(TRACEBACK) - 1000) :][:10_000], sep="\n", flush=True)
    alone = results["alone"]["median_seconds"]
    held = {
        f"{name}: median at most {most:g} x alone, worst {worst:g} s": (
            found["median_seconds"] <= most * alone and found["worst_seconds"] <= worst
        )
        for name, found in results.items()
    } | {"no traceback": TRACEBACK not in log}
    report({"attacks": results, "held": held}, output)
    return not all(held.values())


if __name__ == "__main__":
    raise SystemExit(main())
