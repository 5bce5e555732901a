"""What `--on ray` costs: a verb on three Ray nodes of this machine against the same verb in one process.

    python -m benchmarks.ray FOLDER --verb capture --output FILE.json

With one worker, so that both have one process that computes, on one thread. Each way is run on one chat and on all of
them, in turns: the small run's time is what starting takes, and the rest is work. The demo target answers, or reads,
chats of the standard library, which are prepared in FOLDER once. The bytes of both ways are compared. A file that
exists gets the verb's figures added.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from benchmarks.harness import Output, report, script
from tests.toy.pair import TOY_TARGET

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
SIZES = ("one", "all")
POOL = 800
"""Chats that are prepared; a run takes the first of them."""


def eyas(*words: object) -> float:
    """Run the command line; seconds of wall time."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "eyas", *map(str, words)]
    done = subprocess.run(command, env=ENVIRONMENT, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return time.perf_counter() - began


def prepared(folder: Path, count: int) -> dict[str, Path]:
    """Files of the first chat, and of the first `count`."""
    chats = folder / "chats"
    if not (chats / "report.json").is_file():
        length = ("--max-length", 400, "--held-out-share", 0, "--drop-unanswered")
        eyas("data", "prepare", "stdlib", "--output", chats, "--model", TOY_TARGET, "--samples", POOL, *length)
    lines = (chats / "train.jsonl").read_text().splitlines(keepends=True)
    files = {"one": folder / "one.jsonl", "all": folder / f"first-{count}.jsonl"}
    files["one"].write_text(lines[0])
    files["all"].write_text("".join(lines[:count]))
    return files


def words(verb: str, chats: Path, output: Path) -> tuple[object, ...]:
    """The command of a verb."""
    if verb == "capture":
        how = ("--dtype", "float32", "--shard-mib", 4, "--batch-tokens", 2048, "--held-out-share", 0)
        return ("data", "capture", "--model", TOY_TARGET, "--chats", chats, "--output", output, *how)
    how = ("--dtype", "float32", "--batch-size", 8, "--max-new-tokens", 96)
    return ("data", "regenerate", TOY_TARGET, "--chats", chats, "--output", output.with_suffix(".jsonl"), *how)


def contents(output: Path) -> dict[str, bytes]:
    """The bytes that a verb has written."""
    if output.is_dir():
        return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}
    return {"": output.with_suffix(".jsonl").read_bytes()}


def measured(verb: str, chats: dict[str, Path], folder: Path, on: str, repeats: int) -> dict[str, Any]:
    """Seconds of both ways by size, each way as often as `repeats` says, in turns."""
    ways: dict[str, Sequence[object]] = {"process": (), "ray": ("--on", on, "--workers", 1)}
    seconds: dict[str, dict[str, list[float]]] = {way: {size: [] for size in SIZES} for way in ways}
    same = True
    for repeat in range(repeats):
        work = folder / f"work-{repeat}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for size in SIZES:
            for way, options in ways.items():
                seconds[way][size].append(eyas(*words(verb, chats[size], work / f"{way}-{size}"), *options))
        same = same and contents(work / "process-all") == contents(work / "ray-all")
        shutil.rmtree(work)
    middle = {way: {size: median(each) for size, each in sizes.items()} for way, sizes in seconds.items()}
    work_of = {way: found["all"] - found["one"] for way, found in middle.items()}
    return {
        "seconds": {way: {size: [round(s, 2) for s in each] for size, each in n.items()} for way, n in seconds.items()},
        "same_bytes": same,
        "overhead": round(middle["ray"]["all"] / middle["process"]["all"] - 1, 4),
        "overhead_of_work": round(work_of["ray"] / work_of["process"] - 1, 4),
        "seconds_to_start": round(middle["ray"]["one"] - middle["process"]["one"], 2),
    }


@script
def main(
    folder: Path,
    *,
    verb: Literal["capture", "regenerate"],
    chats: Annotated[int, "chats of the large run"] = POOL,
    repeats: int = 1,
    output: Output = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = prepared(folder, chats)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        found = measured(verb, files, folder, f"ray:{cluster.address}", repeats)
    finally:
        cluster.shutdown()
    known = json.loads(output.read_text())["verbs"] if output is not None and output.is_file() else {}
    report({"nodes": 3, "workers": 1, "verbs": known | {verb: {"chats": chats, **found}}}, output)


if __name__ == "__main__":
    raise SystemExit(main())
