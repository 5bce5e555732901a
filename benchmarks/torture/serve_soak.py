"""A server under load for long: mixed lengths and sampling, a third cancelled midway, a cache too small for all.

    python -m benchmarks.torture.serve_soak [--requests 3000] [--distinct 240] [--clients 24] [--growth 0.02]
        [--output F.json]

Every fourth wave of requests asks for long answers: they start and outgrow the cache together. Checks, and fails
if one doesn't hold: every finished answer is its offline twin's (plain decoding in this process, float32, the same
seed), and what a cancelled one had got is its twin's beginning; nobody waits for `STUCK_SECONDS`; when idle no slot and
no token of a sequence is left; the process's memory grows by less than `--growth` once it is warm. Warm is a quarter of
the requests (caches of prefixes and of compiled kernels fill up); medians of a tenth of the requests each are compared.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

import eyas
from benchmarks.harness import Output, script
from benchmarks.torture.verdict import conclude
from eyas.bench.serving.load import Load, run_load
from eyas.bench.serving.servers import ServerProcess, eyas_server
from eyas.data.chats.stdlib import chats_of, library_modules
from eyas.text.template import encode_chat
from tests.toy.pair import TOY_TARGET

SERVER = (
    "--model demo --draft-model demo --dtype float32 --max-running 24 --max-waiting 64 --max-cached-tokens 2048 "
    "--prefix-tokens 2048"
).split()
STUCK_SECONDS = 180.0
SHORT, LONG = (1, 8, 16, 32, 48, 80), (240, 270, 300)
"""Most tokens of answers."""
CANCELLED, PREEMPTED = 0.3, 0.03
"""At least so many for each request: left in the middle of a stream; pushed out of the full cache."""


@dataclass(frozen=True)
class SoakRequest:
    """A request, and its answer without a server: its offline twin."""

    body: dict[str, Any]
    tokens: int
    text: str

    @property
    def long(self) -> bool:
        """Whether it takes part in the waves that outgrow the cache."""
        return bool(self.body["max_tokens"] in LONG)


Plan = list[tuple[SoakRequest, bool]]
"""Requests in order, each with whether it is cancelled."""


@dataclass
class Seen:
    """How the requests ended, and what was measured meanwhile."""

    endings: Counter[str] = field(default_factory=Counter)
    different: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """The server's memory in KiB, after every request."""


def make_requests(count: int, chance: random.Random) -> list[SoakRequest]:
    """Distinct requests with their offline twins; a quarter of them are long."""
    engine = eyas.load(TOY_TARGET, dtype="float32", batch_size=32)
    chats = [chat for module in list(library_modules())[: 2 * count] for chat in chats_of(module)]
    bodies, requests = [], []
    for number in range(count):
        long = number % 4 == 0
        ids = encode_chat(engine.tokenizer, chats[number * len(chats) // count].messages[:1])
        start = chance.choice([0, 0, len(ids) // 2])
        ids = ids[start : start + (chance.choice([20, 40]) if long else chance.choice([20, 60, 150]))]
        params = {"max_tokens": chance.choice(LONG if long else SHORT), "seed": chance.randrange(2**31)}
        params |= chance.choice([{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}])
        params |= chance.choice([{}, {}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"top_k": 20}])
        params |= {"ignore_eos": True} if long else chance.choice([{}, {"ignore_eos": True}])
        bodies.append({"model": "demo", "prompt": list(ids), **params})
        requests.append(eyas.Request(ids, eyas.SamplingParams(**params)))
    done = engine.generate(requests)
    return [SoakRequest(body, len(twin.token_ids), twin.text) for body, twin in zip(bodies, done, strict=True)]


async def send(
    http: httpx.AsyncClient, request: SoakRequest, cancelled: bool, chance: random.Random, seen: Seen
) -> None:
    """Send one request; a cancelled one is left when some of its stream has come."""
    if not cancelled and chance.random() < 0.5:
        reply = (await http.post("/completions", json=request.body)).raise_for_status().json()
        text, tokens = reply["choices"][0]["text"], reply["usage"]["completion_tokens"]
    else:
        pieces, patience = [], chance.randint(1, request.tokens // 8) if cancelled else None
        body = request.body | {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:]))
                if len(pieces) == patience:
                    break
        text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
        if not pieces[-1].get("usage"):
            seen.endings["cancelled" if cancelled else "cut short"] += 1
            if not request.text.startswith(text.rstrip("\ufffd")):
                seen.different.append({"body": request.body, "text": text, "twin": request.text})
            return
        tokens = pieces[-1]["usage"]["completion_tokens"]
    seen.endings["finished"] += 1
    if (text, tokens) != (request.text, request.tokens):
        seen.different.append({"body": request.body, "text": text, "twin": request.text})


def planned(distinct: list[SoakRequest], count: int, clients: int, chance: random.Random) -> Plan:
    """The requests in order and whether each is cancelled: waves of one per client, every fourth wave long.

    Only requests that go on for a while can be cancelled in the middle.
    """
    plan = []
    for number in range(count):
        cancelled = number % 3 == 2
        wave = [one for one in distinct if one.long == (number // clients % 4 == 0)]
        plan.append((chance.choice([one for one in wave if one.tokens > 30 or not cancelled]), cancelled))
    return plan


async def soak(server: ServerProcess, plan: Plan, clients: int) -> Seen:
    """Send the planned requests, with so many clients at once."""
    seen = Seen()
    async with httpx.AsyncClient(
        base_url=server.url, timeout=STUCK_SECONDS, limits=httpx.Limits(max_connections=None)
    ) as http:

        async def one(number: int) -> None:
            request, cancelled = plan[number]
            began = time.monotonic()
            try:
                await asyncio.wait_for(send(http, request, cancelled, random.Random(number), seen), STUCK_SECONDS)
            except (httpx.HTTPError, asyncio.TimeoutError) as error:
                seen.endings[f"{type(error).__name__}: {error}"[:200]] += 1
            seen.seconds.append(time.monotonic() - began)
            seen.memory.append(resident(server.pid))

        await run_load(Load("closed", clients), one, len(plan), 0)
    return seen


def growth_of(memory: list[int]) -> float:
    """Growth of memory: median of the last tenth over that of the tenth after the first quarter, minus 1."""
    tenth, quarter = len(memory) // 10, len(memory) // 4
    return median(memory[-tenth:]) / median(memory[quarter : quarter + tenth]) - 1


def resident(pid: int) -> int:
    """The resident memory of a process in KiB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)[0])


async def left_over(server: ServerProcess) -> dict[str, float]:
    """Gauges and counters of leaks and preemptions, read once the server is idle."""
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


@script
def main(
    *,
    requests: int = 3000,
    distinct: int = 240,
    clients: int = 24,
    growth: float = 0.02,
    seed: int = 0,
    output: Output = None,
) -> None:
    chance = random.Random(seed)
    made = make_requests(min(distinct, requests), chance)
    plan = planned(made, requests, clients, chance)
    began = time.monotonic()
    with eyas_server("soak", SERVER) as server:
        seen = asyncio.run(soak(server, plan, clients))
        left = asyncio.run(left_over(server))
    grown, preempted = growth_of(seen.memory), left.pop("num_preemptions_total")
    held = {
        "every finished answer equals its twin": not seen.different,
        "nobody was stuck or refused": set(seen.endings) <= {"finished", "cancelled"},
        "a third was cancelled midway": seen.endings["cancelled"] >= CANCELLED * requests,
        "sequences were preempted all the time": preempted >= PREEMPTED * requests,
        "nothing is left when idle": not any(left.values()),
        f"memory grew by less than {growth:.0%}": grown < growth,
    }
    findings = {
        "server": SERVER,
        "clients": clients,
        "requests": requests,
        "distinct": len(made),
        "seconds": round(time.monotonic() - began, 1),
        "slowest_seconds": round(max(seen.seconds), 1),
        "ends": dict(seen.endings),
        "different": len(seen.different),
        "examples": seen.different[:3],
        "preemptions": preempted,
        "memory_growth": round(grown, 4),
        "memory_mib": [round(seen.memory[i * (len(seen.memory) - 1) // 20] / 1024, 1) for i in range(21)],
    }
    conclude(findings, held, output)


if __name__ == "__main__":
    raise SystemExit(main())
