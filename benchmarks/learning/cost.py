"""The cost of collecting, and of a learner next to a server under full load; needs an otherwise idle machine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen

from benchmarks.harness import Output, interleave, paired, report, seconds_of
from benchmarks.learning.attacks import Work
from benchmarks.learning.day import SETTINGS, TREE, Mix, Server
from benchmarks.learning.traffic import Traffic
from eyas.drafters.options import DrafterOptions
from eyas.learn.folder import LearnFolder
from eyas.options import TargetOptions
from eyas.session import Session
from eyas.types import Request

_STARTING = 30.0
"""Seconds after which a learner has started its work."""


def cost(
    model: str, drafter: str, work: Work, *, mix: Mix, count: int = 48, tokens: int = 128, repeats: int = 5,
    tree: str = TREE, output: Output = None,
) -> None:  # fmt: skip
    """Time of the same requests over their time without learning, in turns: a ratio of 1.02 is a cost of 2%.

    Cases: with a collector, with a learner that yields (the default), with one that doesn't (`--always`).
    """
    session, options = Session.open(TargetOptions(model)), DrafterOptions(drafter)
    settings = replace(SETTINGS, tree=tree)
    made = [_long(one, tokens) for one in Traffic(session, mix, mix).window(0)[:count]]
    with tempfile.TemporaryDirectory() as folder, _learner(work, []) as yields, _learner(work, ["--always"]) as always:
        server = Server(session, options, Path(folder) / "learn", model, 0.1, settings)
        static = session.engine(session.drafter(options), settings)
        time.sleep(_STARTING)

        clock = time.pthread_getcpuclockid(_thread("learn-writer"))
        written, spent = list[float](), time.clock_gettime(clock)

        def collecting() -> float:
            nonlocal spent
            seconds = seconds_of(lambda: server.engine.generate(made))
            before, spent = spent, time.clock_gettime(clock)
            written.append((spent - before) / seconds)
            return seconds

        def beside(learner: _Learner) -> float:
            with learner.running():
                return seconds_of(lambda: static.generate(made))

        found = interleave(
            {
                "none": lambda: seconds_of(lambda: static.generate(made)),
                "collecting": collecting,
                "yielding": lambda: beside(yields),
                "always": lambda: beside(always),
            },
            repeats,
        )
        server.learning.close()
        ended = [one.ended for one in (yields, always)]
    report(
        {
            "ratios": {name: paired(found[name], found["none"]) for name in found if name != "none"},
            "seconds": {name: [round(one, 3) for one in each] for name, each in found.items()},
            "writer_s_share_of_a_core": [round(one, 4) for one in written[-repeats:]],
            "learners_ended_early": ended,
        },
        output,
    )


def _thread(name: str) -> int:
    """The identifier of a thread of this process."""
    return next(one.ident for one in threading.enumerate() if one.name == name and one.ident is not None)


def _long(request: Request, tokens: int) -> Request:
    return replace(request, params=request.params.model_copy(update={"max_tokens": tokens, "ignore_eos": True}))


class _Learner:
    """A learner's processes, stopped except in the turns that measure them."""

    def __init__(self, process: Popen[bytes], folder: LearnFolder) -> None:
        self._process, self._folder = process, folder

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run, and signal five times per second that a server is busy."""
        over = threading.Event()

        def sign() -> None:
            while not over.wait(0.2):
                self._folder.mark_busy()

        self._folder.mark_busy()
        os.killpg(self._process.pid, signal.SIGCONT)
        thread = threading.Thread(target=sign)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            os.killpg(self._process.pid, signal.SIGSTOP)


@contextmanager
def _learner(work: Path, words: list[str]) -> Iterator[_Learner]:
    """A learner on a copy of the harvested traffic, with a cycle that takes longer than the measurement."""
    with tempfile.TemporaryDirectory() as copy:
        folder = Path(copy) / "learn"
        shutil.copytree(work / "tools", folder)
        command = [sys.executable, "-m", "eyas", "learn", "run", str(folder), "--least-rows=50", "--epochs=200", *words]
        process = Popen(command, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
        time.sleep(_STARTING)
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            yield _Learner(process, LearnFolder(folder))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
