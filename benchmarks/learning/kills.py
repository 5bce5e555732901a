"""kill -9 of server and learner at random moments: files on disk must survive, and both must resume."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import httpx

from benchmarks.harness import Output, report
from eyas.learn.cycle import CycleConfig, due
from eyas.learn.folder import LearnFolder
from eyas.learn.traffic import TrafficStore

_PORT = 8136
_QUESTIONS = ("How do magnets work?", "Write a haiku about rain.", "What is 17 times 23?", "Name five rivers.")


class _Process:
    """A process that is restarted after each kill."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._process: Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it is running."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "eyas", *self._words]
            self._process = Popen(command, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)

    def kill(self) -> None:
        """Kill it and its children with SIGKILL."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _answer(question: str, seconds: float = 120.0) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{_PORT}/v1/chat/completions", json=body, timeout=seconds)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def _healthy() -> bool:
    """Whether the server is up."""
    return httpx.get(f"http://127.0.0.1:{_PORT}/health").status_code == 200


def _until(what: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if what():
                return True
        time.sleep(0.5)
    return False


def kills(
    model: str, drafter: str, work: Path, *, count: int = 20, least_rows: int = 40, most_seconds: float = 20.0,
    patience: float = 600.0, output: Output = None,
) -> None:  # fmt: skip
    """Serve, learn and kill, once there is enough traffic to learn from: a waiting learner has nothing to lose."""
    words = ["serve", model, "--draft-model", drafter, "--learn", str(work), "--port", str(_PORT)]
    server = _Process([*words, "--served-model-name", "m", "--tree", "chain:5"])
    options = ["--always", "--threads=1", f"--least-rows={least_rows}", "--most-rows=120", "--epochs=1"]
    learner = _Process(["learn", "run", str(work), *options])
    rng, killed, wrong = random.Random(0), Counter[str](), Counter[str]()
    in_cycle = 0
    known: dict[str, str] = {}
    shards: set[str] = set()
    try:
        server.start()
        assert _until(_healthy, patience)
        folder = LearnFolder(work)
        while not due(folder, CycleConfig(least=least_rows)):
            _answer(f"{rng.choice(_QUESTIONS)} ({rng.randrange(10**6)})")
        for _ in range(count):
            server.start()
            assert _until(_healthy, patience)
            learner.start()
            end = time.monotonic() + rng.uniform(1.0, most_seconds)
            while time.monotonic() < end:
                question = rng.choice(_QUESTIONS)
                text = _answer(question)
                wrong["answers"] += text != known.setdefault(question, text)
                _answer(f"{question} ({rng.randrange(10**6)})")
            whom = rng.choice(("server", "learner", "both"))
            killed[whom] += 1
            for name, process in (("server", server), ("learner", learner)):
                if whom in (name, "both"):
                    process.kill()
            shards, damaged = _checked(work, shards)
            wrong.update(damaged)
            in_cycle += whom != "server" and (folder.run / "plan.json").is_file()
            print(sum(killed.values()), whom, dict(wrong), len(shards), in_cycle, flush=True)
        server.start()
        learner.start()
        goes_on = _until(lambda: any("promoted" in event["event"] for event in folder.events()), patience)
    finally:
        for process in (server, learner):
            process.kill()
    report(
        {"killed": dict(killed), "in_a_cycle": in_cycle, "wrong": dict(wrong), "shards": len(shards),
         "a_cycle_ended": goes_on,
         "generations": folder.numbers(), "events": dict(Counter(event["event"] for event in folder.events()))},
        output,
    )  # fmt: skip


def _checked(work: Path, before: set[str]) -> tuple[set[str], dict[str, Any]]:
    """The present shards; the number of earlier shards that are gone, and whether no rows can be read."""
    folder = LearnFolder(work)
    _ = folder.state, folder.settings, [folder.card(number) for number in folder.numbers()]
    found = TrafficStore(folder.traffic, folder.settings.layout, 1 << 40).shards()
    rows = sum(len(shard.rows(folder.settings.layout)) for shard in found)
    return {one.path.name for one in found}, {"gone": len(before - {one.path.name for one in found}), "empty": not rows}
