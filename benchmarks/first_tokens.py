"""First tokens of clients that ask at the same moment: servers side by side, started one after the other.

    python -m benchmarks.first_tokens MODEL [--clients 1 4 16] [--prompt 78] [--tokens 32] [--repeats 5]
        [--draft-model DRAFTER] [--older SRC] [--vllm VENV/bin/python] [--dtype bfloat16] [--out FILE.json]

Every repeat each server gets a burst of requests with prompts of its own, as token ids, to be answered greedily with
`--tokens` tokens, and the servers take turns. Told are medians over the repeats: of the median, the first and the last
client's first token, in seconds; of the longest pause between two pieces of an answer; and of tokens a second, prompts
included. `--older` is the `src` folder of another checkout of eyas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.peers import vllm_server
from eyas.bench.machine import describe_machine
from eyas.bench.serving.servers import ServerProcess, eyas_server

FIGURES = ("median_first", "earliest_first", "last_first", "longest_pause", "tokens_per_second")


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> list[float]:
    """Seconds after which each piece of an answer came."""
    began, moments = time.perf_counter(), []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                moments.append(time.perf_counter() - began)
    return moments


async def burst(server: ServerProcess, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """The figures of requests that are sent at once."""
    async with httpx.AsyncClient(base_url=server.root, timeout=120, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        common = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, common | {"prompt": list(prompt)}) for prompt in prompts))
        seconds = time.perf_counter() - began
    firsts = [moments[0] for moments in answers]
    pauses = [late - early for moments in answers for early, late in pairwise(moments)]
    found = statistics.median(firsts), min(firsts), max(firsts), max(pauses), len(prompts) * tokens / seconds
    return dict(zip(FIGURES, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=78)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--draft-model")
    parser.add_argument("--older", type=Path)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    common = ["--model", str(options.model), "--dtype", options.dtype, "--prefix-tokens", "0"]
    plain = [*common, "--method", "none"]
    servers = {"plain": eyas_server("plain", plain)}
    if options.draft_model:
        servers["auto"] = eyas_server("auto", [*common, "--draft-model", options.draft_model, "--tree", "auto"])
    if options.older:
        servers["older"] = eyas_server("older", plain, {"PYTHONPATH": str(options.older)})
    if options.vllm:
        servers["vllm"] = vllm_server(options.vllm, options.model.parent, 0, options.dtype, True)
    draw, found = random.Random(0), {}
    with ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server)
        for clients in options.clients:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for _ in range(options.repeats + 1):  # the first prepares
                prompts = [[draw.randrange(100, 30000) for _ in range(options.prompt)] for _ in range(clients)]
                for name, server in servers.items():
                    rows[name].append(asyncio.run(burst(server, prompts, options.tokens)))
            for name, each in rows.items():
                medians = {key: round(statistics.median(row[key] for row in each[1:]), 4) for key in FIGURES}
                found[f"{name}, {clients} clients"] = medians
                print(f"{name}, {clients} clients: {json.dumps(medians)}", flush=True)
            if options.out:
                asked = {key: str(value) for key, value in vars(options).items() if value is not None}
                report = {"asked": asked, "found": found, "machine": describe_machine()}
                options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
