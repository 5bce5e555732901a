"""Decoding next to processes that compete for the cores: the share kept of the idle machine's tokens per second.

    python -m benchmarks.busy MODEL [--draft-model DRAFTER | --method ngram] [--clients 1 4] [--loads idle torch ...]
        [--seconds 3] [--threads N] [--output FILE.json]

A load is KIND[:NICE]; several are joined by `+`. `python` is `while True: pass`, `torch` endless matrix products in one
PyTorch thread, `eyas` another eyas that decodes SmolLM2 with its default number of threads. They are children of this
process, share its scheduling group, and start once the model is loaded.

**The fair share** of N threads on C cores follows from the weights that Linux gives to nice values (nice 0: 1024, 10:
110). Each thread, ours and theirs, gets cores in proportion to its weight, at most one core; the rest goes to the
others. The fair part of the idle machine's rate is our share of the cores over min(N, C). An `eyas` load counts as C
threads. `over_fair` is the measured part over the fair one; it should be at least 0.8. `--threads 1` gives the rates of
one thread under the same load; more threads should not be slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch

import eyas
from benchmarks.harness import Output, paired, report, script
from benchmarks.plain_decoding import prompts_of
from eyas.bench.offline.runner import rotated
from eyas.drafters.options import DrafterOptions
from eyas.options import EngineOptions, TargetOptions
from eyas.session import Session

LOADS = ("idle", "python", "torch", "python:10", "torch:10", "python+torch", "python+torch:10", "eyas", "eyas:10")
_WEIGHTS = {0: 1024, 10: 110, 19: 15}
_TORCH = "import torch; torch.set_num_threads(1); x = torch.randn(1024, 1024)\nwhile True: x @ x"
_EYAS = """
import eyas
engine = eyas.load('smollm2', 'smollm2', dtype='bfloat16', tree='chain:4')
request = eyas.Request(tuple(range(5, 45)), eyas.SamplingParams(max_tokens=200, ignore_eos=True))
while True: engine.generate([request])
"""
_PROGRAMS = {"python": "while True: pass", "torch": _TORCH, "eyas": _EYAS}
_STARTING = {"python": 0.3, "torch": 5.0, "eyas": 12.0}
"""Seconds after which each kind has started its work."""


def parts_of(load: str) -> list[tuple[str, int]]:
    """Kind and nice value of each process of a load."""
    if load == "idle":
        return []
    return [(kind, int(nice or 0)) for kind, _, nice in (part.partition(":") for part in load.split("+"))]


def fair_share(load: str, threads: int, cores: int) -> float:
    """The share of its idle rate that a process of `threads` threads should keep under a load."""
    theirs = [_WEIGHTS[nice] for kind, nice in parts_of(load) for _ in range(cores if kind == "eyas" else 1)]
    weights = [_WEIGHTS[0]] * threads + theirs
    got, left = [0.0] * len(weights), float(cores)
    while left > 1e-9 and any(one < 1 for one in got):
        hungry = [i for i, one in enumerate(got) if one < 1]
        total, rest = sum(weights[i] for i in hungry), left
        for i in hungry:
            more = min(1 - got[i], rest * weights[i] / total)
            got[i], left = got[i] + more, left - more
    return sum(got[:threads]) / min(threads, cores)


@contextlib.contextmanager
def running(load: str) -> Iterator[None]:
    """Run the processes of a load; the block begins once they have started their work."""
    parts = parts_of(load)
    children = [
        subprocess.Popen(["nice", "-n", str(nice), sys.executable, "-c", _PROGRAMS[kind]], stderr=subprocess.DEVNULL)
        for kind, nice in parts
    ]
    try:
        time.sleep(max((_STARTING[kind] for kind, _ in parts), default=0.0))
        if any(child.poll() is not None for child in children):
            raise RuntimeError(f"a process of the load {load} ended")
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def rates(
    engines: Mapping[str, eyas.Engine], requests: Sequence[eyas.Request], seconds: float
) -> dict[str, dict[str, Any]]:
    """Tokens per second, prefill included, and the seconds to first tokens, of engines that take turns.

    Each runs for about `seconds`. The ratios to the first engine are those of the same turns.
    """
    found: dict[str, list[float]] = {name: [] for name in engines}
    firsts: dict[str, list[float]] = {name: [] for name in engines}
    first, began = next(iter(engines)), time.perf_counter()
    while not found[first] or time.perf_counter() - began < seconds * len(engines):
        for name in rotated(list(engines), len(found[first])):
            started = time.perf_counter()
            done = engines[name].generate(requests)
            found[name].append(sum(one.stats.tokens for one in done) / (time.perf_counter() - started))
            firsts[name].append(max(one.stats.prefill_seconds for one in done))
    return {
        name: {
            "tokens_per_second": round(statistics.median(found[name]), 2),
            "least": round(min(found[name]), 2), "most": round(max(found[name]), 2),
            "prompt_ms": round(1e3 * statistics.median(firsts[name]), 1), "runs": len(found[name]),
            **({} if name == first else {f"over_{first}": paired(found[name], found[first])["median"]}),
        }
        for name in engines
    }  # fmt: skip


@script
def main(
    model: str,
    *,
    draft_model: str | None = None,
    method: str | None = None,
    dtype: str = "bfloat16",
    clients: Sequence[int] = (1, 4),
    loads: Sequence[str] = LOADS,
    tokens: int = 32,
    seconds: float = 3.0,
    threads: Annotated[int | None, "eyas's threads (default: torch's)"] = None,
    prompt_file: Path | None = None,
    output: Output = None,
) -> None:
    if threads:
        torch.set_num_threads(threads)
    most, session = max(clients), Session.open(TargetOptions(model, dtype=dtype))
    engines = {"plain": session.engine(None, EngineOptions(batch_size=most))}
    if draft_model or method:
        drafter = session.drafter(DrafterOptions(draft_model, method))
        engines["auto"] = session.engine(drafter, EngineOptions("auto", batch_size=most))
    params = eyas.SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompts = prompts_of(engines["plain"], prompt_file, most).tolist()
    requests = [eyas.Request(tuple(prompt), params) for prompt in prompts]
    cores, used = len(os.sched_getaffinity(0)), torch.get_num_threads()
    for engine in engines.values():
        engine.generate(requests)  # warms up
    rows: list[dict[str, Any]] = []
    idle: dict[tuple[str, int], float] = {}
    for load in loads:
        with running(load):
            for count in clients:
                for name, found in rates(engines, requests[:count], seconds).items():
                    row: dict[str, Any] = {"load": load, "engine": name, "clients": count} | found
                    if load == "idle":
                        idle[name, count] = row["tokens_per_second"]
                    elif (name, count) in idle:
                        kept, fair = row["tokens_per_second"] / idle[name, count], fair_share(load, used, cores)
                        row |= {"kept": round(kept, 3), "fair": round(fair, 3), "over_fair": round(kept / fair, 3)}
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    report({"threads": used}, output, rows)


if __name__ == "__main__":
    raise SystemExit(main())
