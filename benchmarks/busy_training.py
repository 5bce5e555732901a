"""Training and capture beside other processes: what torch's threads are worth there.

    python -m benchmarks.busy_training MODEL [--loads idle python ...] [--seconds 3] [--output FILE.json]

`capture` is the target over four rows of 192 tokens, as `eyas data capture` runs it; `train` a step of the EAGLE-3
objective, forward and backward (objective.py, two chats). Each on as many threads as torch takes and on one, in turns.
Loads and fair shares are those of busy.py; what is kept is of the idle machine's rate on all threads.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.busy import fair_share, running
from benchmarks.harness import Output, report, script
from benchmarks.objective import Case, build, step
from eyas.runtime import keep_freed_memory
from eyas.targets import load_target


def works_of(model: str) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    target = load_target(model, dtype="float32")
    tokens = torch.randint(100, target.vocab_size, (4, 192))
    lengths = torch.full((4,), 192)
    network, sides = build(Case("eagle3", 2, 512, 0, bf16=False, prompts=True))
    return {
        "capture": lambda: target.trace(tokens, lengths, (1, 15, 29)),
        "train": lambda: step(network, sides["eyas"]),
    }


def rates(work: Callable[[], object], seconds: float, threads: tuple[int, ...]) -> dict[int, float]:
    """Median runs per second on each number of threads, in turns for about `seconds`."""
    found: dict[int, list[float]] = {count: [] for count in threads}
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or not all(found.values()):
        for count, times in found.items():
            torch.set_num_threads(count)
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    torch.set_num_threads(max(threads))
    return {count: 1 / statistics.median(times) for count, times in found.items()}


@script
def main(
    model: str,
    *,
    loads: Sequence[str] = ("idle", "python", "python:10", "torch"),
    seconds: float = 3.0,
    output: Output = None,
) -> None:
    keep_freed_memory()
    most, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    works = works_of(model)
    for work in works.values():
        work()  # the first time prepares
    rows: list[dict[str, Any]] = []
    idle: dict[str, float] = {}
    for load in loads:
        with running(load):
            for name, work in works.items():
                for count, rate in rates(work, seconds, tuple(sorted({most, 1}, reverse=True))).items():
                    if load == "idle" and count == most:
                        idle[name] = rate
                    row = {"load": load, "work": name, "threads": count, "rate": round(rate, 3)}
                    if name in idle:
                        kept = rate / idle[name]
                        row |= {"kept": round(kept, 3), "over_fair": round(kept / fair_share(load, most, cores), 3)}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    report({}, output, rows)


if __name__ == "__main__":
    raise SystemExit(main())
