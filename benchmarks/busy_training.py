"""Training and capture beside other processes, on one machine: what they keep of the idle machine's rate.

    python -m benchmarks.busy_training MODEL [--loads idle python ...] [--seconds 2] [--waits default passive]
        [--output FILE.json]

`capture` is the target over four rows of 192 tokens, as `eyas data capture` runs it; `train` a step of the EAGLE-3
objective, forward and backward (objective.py, two chats). `follow` chooses torch's threads as `eyas train` does
(`SpareCores`), `all` are as many as torch takes, `one` is one; the first second of `follow`
isn't counted. A capture has nothing to follow: beside the kernels torch has one thread, whatever it is
given, so `one` also takes the kernels' threads.

Each way of waiting is a process of its own: `default` as torch does it, `passive` with OMP_WAIT_POLICY=passive,
`spin:N` with GOMP_SPINCOUNT=N. Loads and fair shares are those of busy.py; `kept` is of the idle machine's rate with
all threads that wait the default way, so `idle` and `default` come first. With the defaults it takes under 3 minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch

from benchmarks.busy import fair_share, running
from benchmarks.harness import Output, report, script
from benchmarks.objective import Case, build, step
from eyas.runtime import SpareCores, keep_freed_memory
from eyas.targets import load_target


def works_of(model: str) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    target = load_target(model, dtype="float32")
    tokens = torch.randint(100, target.vocab_size, (4, 192))
    lengths = torch.full((4,), 192)
    network, sides = build(Case("eagle3", 2, 256, 0, False, True))
    return {
        "capture": lambda: target.trace(tokens, lengths, (1, 15, 29)),
        "train": lambda: step(network, sides["eyas"]),
    }


WAYS = {"capture": ("all", "one"), "train": ("all", "one", "follow")}
_SETTLING = 1.0
"""Seconds in which `follow` may find its number of threads."""


def rates(work: Callable[[], object], seconds: float, ways: Sequence[str]) -> dict[str, dict[str, float]]:
    """Median runs per second in each way, for about so many seconds each, and the threads of the last one."""
    most, found = torch.get_num_threads(), {}
    for way in ways:
        fixed = {"follow": None, "all": most, "one": 1}[way]
        times: list[float] = []
        with SpareCores("the benchmark", torch.device("cpu"), fixed) as cores:
            began = time.perf_counter()
            while not times or time.perf_counter() - began < seconds + _SETTLING * (way == "follow"):
                cores.follow()
                started = time.perf_counter()
                work()
                if way != "follow" or started - began > _SETTLING:
                    times.append(time.perf_counter() - started)
            found[way] = {"rate": 1 / statistics.median(times), "threads": torch.get_num_threads(), "runs": len(times)}
    return found


def measure(model: str, loads: list[str], seconds: float, wait: str, idle: dict[str, float]) -> list[dict[str, Any]]:
    """All rows of one way of waiting, which this process has; fills `idle` if it is the default one's."""
    keep_freed_memory()
    most, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    works = works_of(model)
    for work in works.values():
        work()  # the first time prepares
    rows = []
    for load in loads:
        with running(load):
            for name, work in works.items():
                for way, one in rates(work, seconds, WAYS[name]).items():
                    if load == "idle" and wait == "default" and way == "all":
                        idle[name] = one["rate"]
                    row = {"wait": wait, "load": load, "work": name, "way": way, **one}
                    if name in idle:
                        kept = one["rate"] / idle[name]
                        row |= {"kept": round(kept, 3), "over_fair": round(kept / fair_share(load, most, cores), 3)}
                    rows.append(row)
    return rows


_WAITS = {"default": "", "passive": "OMP_WAIT_POLICY=passive"}


@script
def main(
    model: str,
    *,
    loads: Sequence[str] = ("idle", "python", "python:10", "torch"),
    waits: Sequence[str] = ("default", "passive"),
    seconds: float = 2.0,
    idle: Annotated[dict[str, float] | None, "what a child process is told of the rates before", json.loads] = None,
    output: Output = None,
) -> None:
    if idle is not None:
        print(json.dumps({"rows": measure(model, list(loads), seconds, waits[0], idle), "idle": idle}))
        return
    rows: list[dict[str, Any]] = []
    idle = {}
    for wait in waits:
        name, _, value = (_WAITS.get(wait) or wait.replace("spin:", "GOMP_SPINCOUNT=")).partition("=")
        command = [sys.executable, "-m", "benchmarks.busy_training", model, "--loads", *loads]
        command += ["--waits", wait, "--seconds", str(seconds), "--idle", json.dumps(idle)]
        environment = os.environ | ({name: value} if value else {})
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        said = json.loads(done.stdout.splitlines()[-1])
        idle = said["idle"]
        rows += said["rows"]
    report({}, output, rows)


if __name__ == "__main__":
    raise SystemExit(main())
