"""Several Ray nodes on this machine: the same bytes as one process makes, whatever is killed. `make ray` runs it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.text.chats import exchange, write_chats

from ..pairs import Pair, save_drafter, save_target

ray = pytest.importorskip("ray", reason="make ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class Nodes:
    """A cluster of three nodes with one CPU each, and the processes of its workers."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.others = [self.cluster.add_node(num_cpus=1) for _ in range(2)]

    @property
    def on(self) -> str:
        return f"ray:{self.cluster.address}"

    def workers(self) -> list[int]:
        """Processes of actors, which are children of the nodes' raylets."""
        raylets = {node.all_processes["raylet"][0].process.pid for node in self.cluster.list_all_nodes()}
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
        """Kill a node with its workers; a new one joins."""
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)
        self.others.append(self.cluster.add_node(num_cpus=1))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.cluster.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("pair")
    return Pair(save_target(path / "model"), save_drafter(path / "drafter"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_chats(path, [exchange(f"c{i}", f"What is {i}+{i} in May?", f"<<{i}+{i}={2 * i}>> clips") for i in range(40)])
    return path


def eyas(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "eyas", *map(str, words)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(*words: object) -> str:
    process = eyas(*words)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def capture(pair: Pair, chats: Path, store: Path) -> tuple[object, ...]:
    """Some thirty shards."""
    return (
        "data", "capture", "--model", pair.model, "--chats", chats, "--held-out-share", 0.1, "--dtype", "float32",
        "--shard-mib", 0.01, "--batch-tokens", 64, "--output", store,
    )  # fmt: skip


def regenerate(pair: Pair, chats: Path, output: Path) -> tuple[object, ...]:
    return (
        "data", "regenerate", pair.model, "--chats", chats, "--max-new-tokens", 48, "--batch-size", 2, "--dtype",
        "float32", "--output", output,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed_at_random(nodes: Nodes, words: tuple[object, ...], kills: int, seed: int) -> list[str]:
    """Run a command until it has ended well, killing workers, nodes and the command itself; what was killed."""
    draw, done = random.Random(seed), []
    process = eyas(*words, "--on", nodes.on)
    while True:
        until = time.monotonic() + 1.0 + draw.random() * 6.0
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if process.poll() == 0:
            return done
        assert process.poll() is None, process.communicate()[0]
        if len(done) == kills:
            output = process.communicate()[0]
            assert process.returncode == 0, output
            return done
        what = draw.choice(["worker", "worker", "worker", "node", "command"])
        if what == "worker" and (workers := nodes.workers()):
            os.kill(draw.choice(workers), signal.SIGKILL)
        elif what == "node":
            nodes.lose_a_node()
        elif what == "command":
            process.kill()
            process.communicate()
            process = eyas(*words, "--on", nodes.on)
        else:
            continue
        done.append(what)


def test_capture_and_regeneration_end_with_the_same_bytes(
    nodes: Nodes, pair: Pair, chats: Path, tmp_path: Path
) -> None:
    run(*capture(pair, chats, tmp_path / "one"))
    output = run(*capture(pair, chats, tmp_path / "many"), "--on", nodes.on)
    assert "many is complete" in output
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    run(*regenerate(pair, chats, tmp_path / "one.jsonl"))
    run(*regenerate(pair, chats, tmp_path / "many.jsonl"), "--on", nodes.on)
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


@pytest.mark.parametrize("verb", [capture, regenerate], ids=["capture", "regenerate"])
def test_ten_kills_at_random_moments(verb: Any, nodes: Nodes, pair: Pair, chats: Path, tmp_path: Path) -> None:
    run(*verb(pair, chats, tmp_path / "one"))
    done = killed_at_random(nodes, verb(pair, chats, tmp_path / "many"), 10, seed=3)
    assert done, "it ended before anything was killed"
    if verb is capture:
        assert contents(tmp_path / "many") == contents(tmp_path / "one")
    else:
        assert (tmp_path / "many").read_bytes() == (tmp_path / "one").read_bytes()


def test_machines_that_are_too_small(nodes: Nodes, pair: Pair, chats: Path, tmp_path: Path) -> None:
    process = eyas(*capture(pair, chats, tmp_path / "x"), "--on", nodes.on, "--gpus-per-worker", 1)
    assert "no machine of the cluster fits a worker with 1 CPUs and 1 GPUs" in process.communicate()[0]
    assert process.returncode == 2
