"""First tokens of clients that ask at the same moment: servers side by side, started one after the other.

    python -m benchmarks.first_tokens MODEL [--clients 1 4 16] [--prompt 78] [--tokens 32] [--repeats 5]
        [--draft-model DRAFTER] [--older SRC] [--vllm VENV/bin/python] [--dtype bfloat16] [--output FILE.json]

Every repeat each server gets a burst of requests with prompts of its own, as token ids, to be answered greedily with
`--tokens` tokens, and the servers take turns. Told are medians over the repeats: of the median, the first and the last
client's first token, in seconds; of the longest pause between two pieces of an answer; and of tokens a second, prompts
included. `--older` is the `src` folder of another checkout of eyas.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx

from benchmarks.harness import Output, interleave, report, script
from benchmarks.serving.peers import Pair, vllm_server
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


@script
def main(
    model: Path,
    *,
    clients: Sequence[int] = (1, 4, 16),
    prompt: Annotated[int, "tokens"] = 78,
    tokens: int = 32,
    repeats: int = 5,
    draft_model: str | None = None,
    older: Annotated[Path | None, "the src folder of another checkout"] = None,
    vllm: Annotated[Path | None, "the Python of an environment with vLLM for CPU"] = None,
    dtype: str = "bfloat16",
    output: Output = None,
) -> None:
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    common = ["--model", str(model), "--dtype", dtype, "--prefix-tokens", "0"]
    plain = [*common, "--method", "none"]
    servers = {"plain": eyas_server("plain", plain)}
    if draft_model:
        servers["auto"] = eyas_server("auto", [*common, "--draft-model", draft_model, "--tree", "auto"])
    if older:
        servers["older"] = eyas_server("older", plain, {"PYTHONPATH": str(older)})
    if vllm:
        servers["vllm"] = vllm_server(vllm, Pair.at(str(model.parent)), 0, dtype, True)

    def bursts(server: ServerProcess, size: int) -> Callable[[], dict[str, float]]:
        """A burst a turn, each with prompts of its own that are the same for every server."""
        numbers = count()

        def one() -> dict[str, float]:
            draw = random.Random(f"{size} {next(numbers)}")
            prompts = [[draw.randrange(100, vocabulary) for _ in range(prompt)] for _ in range(size)]
            return asyncio.run(burst(server, prompts, tokens))

        return one

    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server)
        for size in clients:
            found = interleave({name: bursts(server, size) for name, server in servers.items()}, repeats)
            for name, each in found.items():
                medians = {key: round(statistics.median(row[key] for row in each), 4) for key in FIGURES}
                rows.append({"server": name, "clients": size, **medians})
    report({}, output, rows)


if __name__ == "__main__":
    raise SystemExit(main())
