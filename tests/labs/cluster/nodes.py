"""Several Ray nodes on this machine, their processes, and small runs of the verbs that they can share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from eyas.text.chats import exchange, write_chats

from ...pairs import Pair

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
Words = tuple[object, ...]


class Nodes:
    """A cluster of nodes with one CPU each, by default three, and the processes of its workers."""

    def __init__(self, others: int = 2, system: dict[str, Any] | None = None) -> None:
        """`system`: Ray's own system settings."""
        from ray.cluster_utils import Cluster

        head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False}
        self.cluster = Cluster(
            initialize_head=True, head_node_args=head if system is None else {**head, "_system_config": system}
        )
        self.others = [self.cluster.add_node(num_cpus=1) for _ in range(others)]

    @property
    def on(self) -> str:
        """The value of --on."""
        return f"ray:{self.cluster.address}"

    def workers(self, of: Collection[int] | None = None) -> list[int]:
        """Processes of actors: children of the raylets of all nodes, or of the raylets `of`."""
        raylets = of or {node.all_processes["raylet"][0].process.pid for node in self.cluster.list_all_nodes()}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                name = (folder / "cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            if parent in raylets and name.startswith(b"ray::WorkerActor"):
                found.append(int(folder.name))
        return found

    def lose_a_node(self) -> None:
        """Kill a node with its workers and add a new one."""
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)
        self.others.append(self.cluster.add_node(num_cpus=1))


def start(*words: object, log: Path, environment: Mapping[str, str] = ENVIRONMENT) -> subprocess.Popen[bytes]:
    """Start the command line with its output in a file: a pipe that nobody reads would block it."""
    command = [sys.executable, "-m", "eyas", *map(str, words)]
    with log.open("ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def run(*words: object, log: Path) -> str:
    """Run the command line to its end, which must be successful; returns its output."""
    assert start(*words, log=log).wait(200) == 0, log.read_text()
    return log.read_text()


def write_questions(path: Path, count: int) -> Path:
    """Write chats that differ in their numbers."""
    write_chats(
        path, [exchange(f"c{i}", f"What is {i}+{i} in May?", f"<<{i}+{i}={2 * i}>> clips") for i in range(count)]
    )
    return path


def capture(pair: Pair, chats: Path, output: Path) -> Words:
    """A capture in shards of one or two rows."""
    return (
        "data",
        "capture",
        "--model",
        pair.model,
        "--chats",
        chats,
        "--held-out-share",
        0.1,
        "--dtype",
        "float32",
        "--shard-mib",
        0.01,
        "--batch-tokens",
        64,
        "--output",
        output,
    )


def regenerate(pair: Pair, chats: Path, output: Path) -> Words:
    """A regeneration into a file."""
    return (
        "data",
        "regenerate",
        pair.model,
        "--chats",
        chats,
        "--max-new-tokens",
        48,
        "--batch-size",
        2,
        "--dtype",
        "float32",
        "--output",
        output.with_suffix(".jsonl"),
    )


def sweep(pair: Pair, chats: Path, output: Path, **settings: Any) -> Words:
    """A sweep of three tiny trials; `settings` are further settings of its file."""
    drafter = {
        "target": str(pair.model), "chats": str(chats), "held_out_share": 0.2, "output": "unused", "device": "cpu",
        "target_dtype": "float32", "shape": {"kind": "eagle3", "draft_vocab_size": 64}, "loss": {"unroll": 2},
        "batch_tokens": 256, "max_length": 128,
        "validation": {"batches": 1, "prompts": 1, "max_tokens": 4, "tree": "chain:2"},
        "loop": {"steps": 20, "bf16": False, "validate_every": 5, "save_seconds": 0.2},
    }  # fmt: skip
    recipe = output.with_suffix(".recipe.yaml")
    file = output.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump({"drafter": drafter}))
    config = {
        "recipe": str(recipe), "output": str(output), "knobs": {"drafter.loop.optimizer.lr": [0.03, 0.01, 0.003]},
        "score": {"prompts": 3, "max_tokens": 12, "tree": "dynamic:2,25,50"}, "threads": 1,
        "timing": {"best": 1, "repeats": 1, "warmup": 0}, **settings,
    }  # fmt: skip
    file.write_text(yaml.safe_dump(config))
    return ("sweep", file)


def halving(pair: Pair, chats: Path, output: Path) -> Words:
    """The same sweep, with only the best third trained to the end."""
    return sweep(pair, chats, output, halving={"rungs": 2})


def bytes_of(output: Path) -> dict[str, bytes]:
    """The output of a run of one of these verbs, apart from times."""
    answers = output.with_suffix(".jsonl")
    if answers.is_file():
        return {answers.suffix: answers.read_bytes()}
    results = output / "results.json"
    if not results.is_file():
        return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}
    found = {
        str(path.relative_to(output)): path.read_bytes()
        for path in (output / "trials").rglob("*")
        if path.suffix == ".safetensors" and "state" not in path.parts
    }
    rows = [{name: row[name] for name in ("values", "tasks", "failure")} for row in _rows(results)]
    return found | {"results.json": json.dumps(rows).encode()}


def _rows(results: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(results.read_text())["trials"]
    return rows
