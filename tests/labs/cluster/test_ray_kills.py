"""kill -9 of Ray's workers, nodes and of the command at random moments, and workers that come to life again.

The runs are long enough that most kills fall into work, not into the start of workers. `make ray` runs it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ...pairs import Pair
from .nodes import Nodes, bytes_of, capture, regenerate, run, start, sweep, write_questions

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own

LONGEST = 220.0
"""Seconds after which a run counts as stuck."""


def progress(output: Path) -> int:
    """Something that grows with what is finished."""
    journal = next(iter(output.parent.glob(f"{output.name}*journal*")), None)
    if journal is not None:
        return journal.stat().st_size
    return sum(1 for path in output.rglob("*") if path.suffix in (".safetensors", ".json"))


def killed_at_random(
    nodes: Nodes, words: tuple[object, ...], output: Path, kills: list[str], seed: int
) -> Counter[str]:
    """Run a command until it has ended well, killing what `kills` says at random moments; what was killed.

    Half of the moments lie within seconds of the last kill, while workers start; half a moment after something is
    finished.
    """
    draw = random.Random(seed)
    done = Counter[str]()
    log = output.with_suffix(".log")
    process = start(*words, "--on", nodes.on, log=log)
    end = time.monotonic() + LONGEST
    for what in kills:
        before = progress(output)
        latest = time.monotonic() + 40.0
        if draw.random() < 0.5:
            while process.poll() is None and progress(output) == before and time.monotonic() < latest:
                time.sleep(0.05)
        time.sleep(draw.uniform(0.0, 4.0))
        if what == "worker":
            while process.poll() is None and not nodes.workers() and time.monotonic() < latest:
                time.sleep(0.05)
        if process.poll() is not None:
            break
        if what == "command":
            process.kill()
            process.wait()
            process = start(*words, "--on", nodes.on, log=log)
        elif what == "node":
            nodes.lose_a_node()
        elif workers := nodes.workers():
            os.kill(draw.choice(workers), signal.SIGKILL)
        else:
            continue
        done[what] += 1
    assert process.wait(max(1.0, end - time.monotonic())) == 0, log.read_text()
    assert "(raylet)" not in log.read_text()  # Ray's own reports, which are pages
    return done


@pytest.mark.parametrize(
    ("verb", "chats", "kills"),
    [
        (capture, 3000, ["worker", "node", "worker", "command", "worker", "node", "worker"]),
        (regenerate, 600, ["worker", "command", "node", "worker", "worker", "node", "command", "worker"]),
        (sweep, 40, ["worker", "node", "command", "worker", "worker"]),
    ],
    ids=["capture", "regenerate", "sweep"],
)
def test_kills_at_random_moments(
    verb: Any, chats: int, kills: list[str], nodes: Nodes, pair: Pair, tmp_path: Path
) -> None:
    """Twenty in all."""
    questions = write_questions(tmp_path / "chats.jsonl", chats)
    run(*verb(pair, questions, tmp_path / "one"), log=tmp_path / "one.log")
    words = verb(pair, questions, tmp_path / "many")
    done = killed_at_random(nodes, words, tmp_path / "many", kills, seed=len(kills))
    print(f"{verb.__name__}: killed {dict(done)}")
    one = bytes_of(tmp_path / "one")
    many = bytes_of(tmp_path / "many")
    assert one.keys() == many.keys()
    assert [name for name in one if one[name] != many[name]] == []
    assert done == Counter(kills), "it ended before all were killed"
