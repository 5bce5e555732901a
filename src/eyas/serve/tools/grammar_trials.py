"""Grammars of requests are compiled in child processes before they may be compiled in the server.

llguidance limits its compiler, but not in every way: a schema of a few hundred characters can keep it busy for hours,
and a long chain of rules overflows its stack, which ends the process. In a child process this harms no other request.

No client waits for another's grammar: a grammar that is compiled already is used immediately. New ones are compiled one
at a time per client, and the clients take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from eyas.errors import QueueFullError, RequestError, UsageError
from eyas.types import GrammarSpec
from eyas.verify import compile_grammar
from eyas.verify.grammar import LIMITS, cached_grammar, grammar_source, tokenizer_json, vocabulary_of

_INHERITED = frozenset(
    "PATH PYTHONPATH PYTHONHOME LD_LIBRARY_PATH DYLD_LIBRARY_PATH LANG HOME TMPDIR TEMP TMP SYSTEMROOT".split()
)
"""Environment variables that the child gets."""
_CPU_SECONDS = 5.0
"""Processor time that compiling and trying a grammar may take."""
_CLOCK_FACTOR = 120.0
"""How many times as long it may take in wall time, on a busy machine."""
_START_SECONDS = 10.0
"""Processor time that a child may need to start and to read the vocabulary."""
_CHILDREN = 2
"""How many grammars are compiled at the same time."""
_MAX_WAITING = 16
"""How many new grammars of one client may wait to be compiled."""
_MAX_REMEMBERED = 1024
"""How many grammars that passed are remembered and not tried again."""


class GrammarTrials:
    """Compiles grammars for the engine, each in a child process first; the children end with this process."""

    def __init__(self, seconds: float = _CPU_SECONDS) -> None:
        """`seconds`: processor time that compiling and trying a grammar may take."""
        self._seconds = seconds
        self._passed: OrderedDict[GrammarSpec, None] = OrderedDict()
        self._lock = Lock()
        self._children = [GrammarChild() for _ in range(_CHILDREN)]
        self._free: queue.SimpleQueue[GrammarChild] = queue.SimpleQueue()
        for child in self._children:
            self._free.put(child)
        self._workers = ThreadPoolExecutor(_CHILDREN, "grammar")
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._waiting: dict[tuple[str, GrammarSpec], asyncio.Future[None]] = {}

    async def check(self, tokenizer: Any, spec: GrammarSpec, client: str) -> None:
        """Compile a client's grammar unless it is compiled already.

        Raises RequestError or UsageError if it can't be used, QueueFullError if too many of the client's are waiting.
        """
        if await asyncio.to_thread(cached_grammar, tokenizer, spec) is not None:
            return
        key = client, spec
        if key not in self._waiting:
            if sum(each == client for each, _ in self._waiting) >= _MAX_WAITING:
                message = f"{_MAX_WAITING} of this client's grammars are being compiled already: send this one later"
                raise QueueFullError(message, self._seconds)
            self._waiting[key] = asyncio.ensure_future(self._compile_in_turn(tokenizer, spec, client))
            self._waiting[key].add_done_callback(lambda done: self._remove(key, done))
        await asyncio.shield(self._waiting[key])  # other requests may wait for it, too

    def compile(self, tokenizer: Any, spec: GrammarSpec) -> None:
        """Compile a grammar, in a child first unless it has passed before. Raises RequestError or UsageError."""
        source = grammar_source(spec)
        if spec not in self._passed:
            child = self._free.get()
            try:
                child.compile(tokenizer, source, self._seconds)
            finally:
                self._free.put(child)
            with self._lock:
                self._passed[spec] = None
                if len(self._passed) > _MAX_REMEMBERED:
                    self._passed.popitem(last=False)
        compile_grammar(tokenizer, spec)

    def close(self) -> None:
        """End the child processes."""
        for child in self._children:
            child.close()

    async def _compile_in_turn(self, tokenizer: Any, spec: GrammarSpec, client: str) -> None:
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn:  # so a client has at most one grammar in the pool's queue
            await asyncio.get_running_loop().run_in_executor(self._workers, self.compile, tokenizer, spec)

    def _remove(self, key: tuple[str, GrammarSpec], done: asyncio.Future[None]) -> None:
        del self._waiting[key]
        if not done.cancelled():
            done.exception()  # the waiters get it; if all have left, this keeps asyncio from reporting it


class GrammarChild:
    """A process that compiles grammars, started with the first one and again after one has crashed it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[..., GrammarChild] | None = None

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    def compile(self, tokenizer: Any, source: str, seconds: float) -> None:
        """Compile a grammar in llguidance's syntax and try it out.

        Raises RequestError if that takes more than `seconds` of processor time, crashes the process, or reaches one of
        llguidance's limits, and QueueFullError if the machine is too busy for it.
        """
        if not self.running:
            self._start(tokenizer)
        problem = self._send({"source": source, "limits": LIMITS, "seconds": seconds}, _CLOCK_FACTOR * seconds)
        if problem:
            raise RequestError(f"the grammar can't be used: it reaches a limit of llguidance: {problem}")
        if problem is None and self.running:
            self.close()
            raise QueueFullError("this machine is too busy to compile a new grammar: send the request later", seconds)
        if problem is None:
            assert self._process is not None
            too_long = self._process.returncode == -signal.SIGPROF
            why = f"compiling it takes longer than {seconds:g} seconds" if too_long else "it breaks the compiler"
            self.close()
            raise RequestError(f"the grammar can't be used: {why}; make it simpler")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self, tokenizer: Any) -> None:
        self.close()
        vocabulary = {"vocabulary": tokenizer_json(tokenizer), "end": tokenizer.eos_token_id}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eyas.serve.tools.grammar_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._write(vocabulary)
        try:
            vocabulary_of(tokenizer)  # the server needs its own, and reads it while the child does
        except Exception:
            self.close()  # or its answer to this would pass for that to the first grammar
            raise
        if self._answer(_CLOCK_FACTOR * _START_SECONDS) is None:
            busy = self.running
            self.close()
            if busy:
                raise QueueFullError("this machine is too busy to compile grammars: send the request later", 60.0)
            raise UsageError("grammars can't be compiled: the process for them doesn't start")

    def _send(self, message: dict[str, Any], seconds: float) -> str | None:
        """Send a line to the child and wait for its answer; None if none comes in time."""
        self._write(message)
        return self._answer(seconds)

    def _write(self, message: dict[str, Any]) -> None:
        """Send a line to the child; one that has ended gives no `_answer`."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _answer(self, seconds: float) -> str | None:
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:  # select() can't take large file descriptors
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(seconds)
        answer = self._process.stdout.readline() if ready else ""
        if ready and not answer:  # its output is closed: it is ending
            self._process.wait()
        return answer.strip() if answer else None


def _environment() -> dict[str, str]:
    """The environment variables that the child needs to start: no keys of this server or of other services."""
    return {name: value for name, value in os.environ.items() if name.upper() in _INHERITED or name.startswith("LC_")}


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    if process.stdin is not None and process.stdout is not None:
        with contextlib.suppress(BrokenPipeError):  # from lines that it never read
            process.stdin.close()
        process.stdout.close()
    process.wait()
