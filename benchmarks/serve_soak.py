"""A server under load for long: mixed lengths and sampling, a third cancelled midway, a cache too small for all.

    python benchmarks/serve_soak.py [--requests 3000] [--distinct 240] [--clients 24] [--growth 0.02] [--output F.json]

Checks, and fails if one doesn't hold: every finished answer is its offline twin's (plain decoding in this process,
float32, the same seed); nobody waits forever; sequences were preempted; when idle no slot and no token of a sequence is
left; the process's memory after the first quarter of the requests grows by less than `--growth`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from serving import conclude

import eyas
from eyas.bench.serve_load import Load, run_load
from eyas.bench.serve_process import ServerProcess, eyas_server
from eyas.data.prompts import encode_chat
from eyas.data.stdlib_corpus import chats_of, sources

SERVER = (
    "--model demo --draft-model demo --max-running 8 --max-waiting 64 --max-cached-tokens 768 --prefix-tokens 2048"
).split()
STUCK_SECONDS = 180.0


@dataclass(frozen=True)
class Ask:
    """A request, and its answer without a server."""

    body: dict[str, Any]
    tokens: int
    text: str


@dataclass
class Seen:
    """What came of the requests."""

    ends: Counter[str] = field(default_factory=Counter)
    different: list[dict[str, Any]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """KiB, once for every request."""


def asks(count: int, chance: random.Random) -> list[Ask]:
    """Distinct requests with their offline twins."""
    engine = eyas.load("demo", batch_size=16)
    chats = [chat for module in list(sources())[: 2 * count] for chat in chats_of(module)]
    bodies, requests = [], []
    for number in range(count):
        ids = encode_chat(engine.tokenizer, chats[number * len(chats) // count].messages[:1])
        start = chance.choice([0, 0, len(ids) // 2])
        ids = ids[start : start + chance.choice([20, 20, 60, 150])]
        params = {"max_tokens": chance.choice([1, 8, 32, 120, 250]), "seed": chance.randrange(2**31)}
        params |= chance.choice([{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}])
        params |= chance.choice([{}, {}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"top_k": 20}])
        params |= chance.choice([{}, {"ignore_eos": True}])
        bodies.append({"model": "demo", "prompt": list(ids), **params})
        requests.append(eyas.Request(ids, eyas.SamplingParams(**params)))
    done = engine.generate(requests)
    return [Ask(body, len(twin.token_ids), twin.text) for body, twin in zip(bodies, done, strict=True)]


async def send(http: httpx.AsyncClient, ask: Ask, cancelled: bool, chance: random.Random, seen: Seen) -> None:
    """One request; one that is cancelled is left after some of its stream, or before it begins."""
    if not cancelled and chance.random() < 0.5:
        said = (await http.post("/completions", json=ask.body)).raise_for_status().json()
        text, tokens = said["choices"][0]["text"], said["usage"]["completion_tokens"]
    else:
        pieces, patience = [], chance.choice([0, 0, 1, 2, 5, 10]) if cancelled else None
        body = ask.body | {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:]))
                if patience is not None and len(pieces) > patience:
                    seen.ends["cancelled"] += 1
                    return
        text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
        tokens = pieces[-1]["usage"]["completion_tokens"]
    seen.ends["finished"] += 1
    if (text, tokens) != (ask.text, ask.tokens):
        seen.different.append({"body": ask.body, "text": text, "twin": ask.text})


async def soak(server: ServerProcess, asked: list[Ask], count: int, clients: int, chance: random.Random) -> Seen:
    """`count` requests by so many clients."""
    seen = Seen()
    plan = [(chance.choice(asked), number % 3 == 2) for number in range(count)]
    async with httpx.AsyncClient(
        base_url=server.url, timeout=STUCK_SECONDS, limits=httpx.Limits(max_connections=None)
    ) as http:

        async def one(number: int) -> None:
            ask, cancelled = plan[number]
            try:
                await asyncio.wait_for(send(http, ask, cancelled, random.Random(number), seen), STUCK_SECONDS)
            except (httpx.HTTPError, asyncio.TimeoutError) as error:
                seen.ends[f"{type(error).__name__}: {error}"[:200]] += 1
            seen.memory.append(resident(server.pid))

        await run_load(Load("closed", clients), one, count, 0)
    return seen


def resident(pid: int) -> int:
    """KiB in memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)[0])


async def left_over(server: ServerProcess) -> dict[str, float]:
    """Gauges and counters that tell of leaks and preemptions, once the server is idle."""
    used = ("num_requests_running", "num_requests_prefilling", "num_requests_waiting", "cached_tokens")
    names = (*used, "num_preemptions_total")
    async with httpx.AsyncClient() as http:
        for _ in range(100):
            page = (await http.get(f"{server.root}/metrics")).text
            found = {name: float(re.findall(rf"^eyas:{name}{{.*}} (\S+)", page, re.MULTILINE)[0]) for name in names}
            if not any(found[name] for name in used):
                break
            await asyncio.sleep(0.1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--distinct", type=int, default=240)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--growth", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    asked = asks(min(options.distinct, options.requests), chance)
    with eyas_server("soak", SERVER) as server:
        seen = asyncio.run(soak(server, asked, options.requests, options.clients, chance))
        left = asyncio.run(left_over(server))
    warm = max(seen.memory[: len(seen.memory) // 4 + 1])
    growth = max(seen.memory[-len(seen.memory) // 4 :]) / warm - 1
    held = {
        "every finished answer equals its twin": not seen.different,
        "nobody was stuck or refused": set(seen.ends) <= {"finished", "cancelled"},
        "sequences were preempted": left["num_preemptions_total"] > 0,
        "nothing is left when idle": not any(left[name] for name in left if name != "num_preemptions_total"),
        f"memory grew by less than {options.growth:.0%}": growth < options.growth,
    }
    findings = {
        "server": SERVER,
        "requests": options.requests,
        "distinct": len(asked),
        "ends": dict(seen.ends),
        "different": len(seen.different),
        "examples": seen.different[:3],
        "preemptions": left["num_preemptions_total"],
        "memory_growth": round(growth, 4),
        "memory_mib": [round(seen.memory[i * (len(seen.memory) - 1) // 20] / 1024, 1) for i in range(21)],
    }
    conclude(findings, held, options.output)


if __name__ == "__main__":
    main()
