"""Two torchruns on this machine stand for two machines with a shared folder: their result is one machine's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .test_processes import recipe, write

pytestmark = pytest.mark.slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(options: Sequence[str], recipe_file: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [*TORCHRUN, *options, "-m", "eyas", "train", recipe_file],
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def nodes(recipe_file: str, logs: Sequence[Path]) -> list[subprocess.Popen[bytes]]:
    """A process on each of two nodes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    shared = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    return [start((*shared, "--node-rank", str(rank)), recipe_file, log) for rank, log in enumerate(logs)]


def ended(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    codes = [process.wait(120) for process in processes]
    assert not any(codes), "\n".join(log.read_text() for log in logs)


def weights(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*.safetensors")
        if "state" not in path.relative_to(folder).parts
    }


def test_two_nodes_are_one_with_two_processes(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    """Also after one of them was killed, which ends the other with one message."""

    def made(name: str) -> dict[str, Any]:
        loop = {"steps": 60, "accumulate": 2, "validate_every": 20, "save_seconds": 0.2}
        return recipe(sure_target, chats, tmp_path / name, **loop)

    alone = tmp_path / "alone.log"
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    ended([start(("--standalone", "--nproc-per-node", "2"), write(made("alone")), alone)], [alone])
    again = write(made("nodes"))
    both = nodes(again, logs)
    state = tmp_path / "nodes" / "state"
    until = time.monotonic() + 100
    while not state.exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)
    for folder in Path("/proc").glob("[0-9]*"):  # the machine with all its processes, which lead sessions of their own
        if _machine(folder) == both[1].pid:
            os.kill(int(folder.name), signal.SIGKILL)
    began = time.monotonic()
    assert both[0].wait(60) != 0
    took = time.monotonic() - began
    both[1].wait()
    said = logs[0].read_text()
    assert said.count("another process of this run has ended or is out of reach") == 1, said
    assert "start the same command again on all machines" in said
    print(f"the other node ended {took:.1f} s after the kill")
    assert not (tmp_path / "nodes" / "drafter" / "config.json").exists()  # it was in the middle
    for log in logs:
        log.unlink()
    ended(nodes(again, logs), logs)
    assert "from step 0 " not in logs[0].read_text()
    assert weights(tmp_path / "nodes") == weights(tmp_path / "alone")


def _machine(folder: Path) -> int | None:
    """The process itself if it is a torchrun, or the torchrun that started it."""
    try:
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        is_agent = b"torch.distributed.run" in (folder / "cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return int(folder.name) if is_agent else parent
