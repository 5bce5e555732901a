"""Three Ray nodes on this machine make the same bytes as one process. `make ray` runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ...pairs import Pair, write_rows
from ...runs import save_run
from .nodes import Nodes, Words, bytes_of, capture, halving, regenerate, run, start, sweep, write_questions

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own


@pytest.mark.parametrize("verb", [capture, regenerate, sweep, halving], ids=lambda verb: verb.__name__)
def test_the_same_bytes_as_in_one_process(verb: Any, nodes: Nodes, pair: Pair, tmp_path: Path) -> None:
    chats = write_questions(tmp_path / "chats.jsonl", 40)
    run(*verb(pair, chats, tmp_path / "one"), log=tmp_path / "one.log")
    run(*verb(pair, chats, tmp_path / "many"), "--on", nodes.on, log=tmp_path / "many.log")
    one = bytes_of(tmp_path / "one")
    many = bytes_of(tmp_path / "many")
    assert one.keys() == many.keys()
    assert [name for name in one if one[name] != many[name]] == []


def counts(file: Path) -> dict[str, Any]:
    """What a measurement has counted of each candidate: everything but seconds."""
    return {
        row["name"]: {task: [count[:3] for count in score["method"]] for task, score in row["tasks"].items()}
        for row in json.loads(file.read_text())["ranked"]
    }


@pytest.mark.parametrize("verb", ["trees", "checkpoints"])
def test_measurements_count_what_one_process_counts(verb: str, nodes: Nodes, pair: Pair, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "math.jsonl", [{"prompt": text} for text in ("48/2?", "clips", "def", "May")])
    few = ("--prompt-file", prompts, "--max-new-tokens", 12, "--repeats", 1, "--warmup", 0, "--dtype", "float32")
    words: Words = ("bench", "checkpoints", save_run(tmp_path / "run", pair.model), *few, "--tree", "dynamic:2,25,50")
    if verb == "trees":
        sizes = ("--tree-depth", 2, "--tree-top-k", 25, "--tree-nodes", "4,50", "--chain", 2, "--coarse", 1)
        drafter = ("--draft-model", pair.drafter, "--finalists", 2, "--by", "accept_length")
        words = ("bench", "trees", "--model", pair.model, *drafter, *few, *sizes)
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    run(*words, "--output", one, log=tmp_path / "one.log")
    said = run(*words, "--output", many, "--on", nodes.on, "--workers", 2, log=tmp_path / "many.log")
    assert "All was measured on one machine of the cluster" in " ".join(said.split())
    assert counts(one) == counts(many)
    (machine,) = json.loads(many.read_text())["machine"]["workers"]
    assert machine["groups"] >= 4


def test_machines_that_are_too_small(nodes: Nodes, pair: Pair, tmp_path: Path) -> None:
    chats = write_questions(tmp_path / "chats.jsonl", 4)
    log = tmp_path / "log"
    words = (*capture(pair, chats, tmp_path / "x"), "--on", nodes.on, "--gpus-per-worker", 1)
    assert start(*words, log=log).wait(100) == 2
    assert "no machine of the cluster fits a worker with 1 CPUs and 1 GPUs" in log.read_text()
