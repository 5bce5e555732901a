"""What may be wrong with machines, on Ray itself: a full disk, one that comes back, another version. `make ray`."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import eyas

from ...pairs import Pair
from .nodes import Nodes, bytes_of, capture, run, start, write_questions

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own

QUICK = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
"""Ray gives up a machine that says nothing after some ten seconds, not after a minute."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("chats") / "chats.jsonl", 800)


def until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def shards(store: Path) -> int:
    return len(list(store.glob("*.safetensors")))


def test_a_full_disk_on_one_machine(pair: Pair, chats: Path, tmp_path: Path) -> None:
    """One worker can't write files of 4 KiB any more; where there is room again, the same command goes on."""
    pytest.importorskip("ray", reason="make ray")
    nodes = Nodes()
    log = tmp_path / "log"
    try:
        process = start(*capture(pair, chats, tmp_path / "many"), "--on", nodes.on, log=log)
        until(lambda: shards(tmp_path / "many") > 5, process, log)
        resource.prlimit(nodes.workers()[0], resource.RLIMIT_FSIZE, (4096, 4096))
        assert process.wait(60) == 1, log.read_text()
        said = " ".join(log.read_text().split())
        assert "can't write" in said
        assert "File too large. Earlier shards are complete; free some space and run the same command again" in said
        assert "(the worker on " in said
        run(*capture(pair, chats, tmp_path / "many"), "--on", nodes.on, log=log)
        run(*capture(pair, chats, tmp_path / "one"), log=tmp_path / "one.log")
        assert bytes_of(tmp_path / "many") == bytes_of(tmp_path / "one")
    finally:
        nodes.cluster.shutdown()


def test_a_machine_that_comes_back(pair: Pair, chats: Path, tmp_path: Path) -> None:
    """A node stops answering in the middle of a shard, is given up, and wakes once its shard is with another."""
    pytest.importorskip("ray", reason="make ray")
    nodes = Nodes(system=QUICK)
    log = tmp_path / "log"
    try:
        process = start(*capture(pair, chats, tmp_path / "many"), "--on", nodes.on, log=log)
        until(lambda: shards(tmp_path / "many") > 5 and len(nodes.workers()) == 3, process, log)
        raylet = nodes.others[0].all_processes["raylet"][0].process.pid
        asleep = [raylet, *nodes.workers(of=[raylet])]
        for pid in reversed(asleep):
            os.kill(pid, signal.SIGSTOP)
        until(lambda: "died" in log.read_text(), process, log)  # and its shard is another's
        for pid in asleep:
            os.kill(pid, signal.SIGCONT)
        assert process.wait(120) == 0, log.read_text()
        run(*capture(pair, chats, tmp_path / "one"), log=tmp_path / "one.log")
        assert bytes_of(tmp_path / "many") == bytes_of(tmp_path / "one")
    finally:
        nodes.cluster.shutdown()


def test_a_machine_with_another_version(pair: Pair, tmp_path: Path) -> None:
    """Its eyas differs in one comment."""
    pytest.importorskip("ray", reason="make ray")
    shutil.copytree(Path(eyas.__file__).parent, tmp_path / "other" / "eyas")
    with (tmp_path / "other" / "eyas" / "types.py").open("a") as file:
        file.write("# another version\n")
    nodes = Nodes(others=0)
    log = tmp_path / "log"
    try:
        nodes.cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(tmp_path / "other")})
        chats = write_questions(tmp_path / "chats.jsonl", 40)
        assert start(*capture(pair, chats, tmp_path / "x"), "--on", nodes.on, log=log).wait(100) == 1
        said = " ".join(log.read_text().split())
        assert "runs another version than this process: source was" in said
        assert "Install the same versions on all machines, and restart Ray there" in said
    finally:
        nodes.cluster.shutdown()
