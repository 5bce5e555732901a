"""Runs recipes one after another in a separate process, as one process of a group: `process.py RECIPE...`.

`process.py RECIPE --kill SECONDS...` runs the recipe once for every number in a fork that is killed with SIGKILL that
many seconds after its first record (in a step, a validation, or the writing of a state), and then once to the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import yaml
from torch import distributed as dist

from eyas.train.recipe import load_recipe, run_recipe


def run(recipe: str) -> None:
    torch.set_num_threads(1)
    run_recipe(load_recipe(recipe))


def kill_at(recipe: str, seconds: float, folder: Path) -> bool:
    """Let a fork train and kill it `seconds` after its first record; false if it ended before that."""
    child = os.fork()
    if not child:
        run(recipe)
        os._exit(0)
    metrics = folder / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if metrics.exists() and metrics.stat().st_mtime_ns > before:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
            return os.WIFSIGNALED(os.waitpid(child, 0)[1])
        time.sleep(0.002)
    return False


def main() -> None:
    if "--kill" not in sys.argv:
        # rendezvous in a file: ports may be taken, and one group is enough for all recipes
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", f"file://{os.environ['MEETING']}", rank=rank, world_size=world_size)
        for recipe in sys.argv[1:]:
            run(recipe)
        dist.barrier()
        sys.stderr.flush()
        # skip the interpreter's shutdown: gloo's threads may still run, which aborts a finished process
        os._exit(0)
    at = sys.argv.index("--kill")
    recipe = sys.argv[1]
    folder = Path(yaml.safe_load(Path(recipe).read_text())["drafter"]["output"])
    killed = [kill_at(recipe, float(mark), folder) for mark in sys.argv[at + 1 :]]
    print(f"killed {sum(killed)} times")
    run(recipe)


if __name__ == "__main__":
    main()
