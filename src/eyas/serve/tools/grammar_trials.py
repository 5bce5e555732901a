"""Grammars of requests are compiled in a child process before they may be compiled in the server.

llguidance limits what its compiler does, but not everything: a schema of a few hundred characters can keep it busy for
hours, and a long chain of rules overflows its stack, which ends the process. In a child that harms no other request.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import weakref
from collections import OrderedDict
from threading import Lock
from typing import Any

from eyas.errors import RequestError
from eyas.types import GrammarSpec
from eyas.verify import compile_grammar
from eyas.verify.grammar import LIMITS, grammar_source

_INHERITED = frozenset(
    "PATH PYTHONPATH PYTHONHOME LD_LIBRARY_PATH DYLD_LIBRARY_PATH LANG HOME TMPDIR TEMP TMP SYSTEMROOT".split()
)
"""Variables of the environment that the child gets."""
_SECONDS = 5.0
"""How long compiling a grammar may take."""
_START_SECONDS = 60.0
"""How long the child may take to start and read the vocabulary."""
_MOST_REMEMBERED = 1024
"""How many grammars that compiled are remembered and not tried again."""


class GrammarTrials:
    """A child process, started with the first grammar and again after one has broken it; it ends with this process."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = Lock()
        self._child: subprocess.Popen[str] | None = None
        self._passed: OrderedDict[GrammarSpec, None] = OrderedDict()

    def check(self, tokenizer: Any, spec: GrammarSpec) -> None:
        """Compile a grammar, in the child first, one at a time; RequestError, UsageError if it can't be used."""
        source = grammar_source(spec)
        with self._lock:
            if spec not in self._passed:
                self._try(tokenizer, source)
                self._passed[spec] = None
                if len(self._passed) > _MOST_REMEMBERED:
                    self._passed.popitem(last=False)
        compile_grammar(tokenizer, spec)

    def close(self) -> None:
        """End the child process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            _end(child)

    def _try(self, tokenizer: Any, source: str) -> None:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._start(tokenizer)
        if not self._send({"source": source, "limits": LIMITS}, self._seconds):
            broken = self._child is not None and self._child.poll() is not None
            self.close()
            why = "it breaks the compiler" if broken else f"compiling it takes longer than {self._seconds:g} seconds"
            raise RequestError(f"the grammar can't be used: {why}; make it simpler")

    def _start(self, tokenizer: Any) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "eyas.serve.tools.grammar_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        )
        weakref.finalize(self, _end, self._child)
        vocabulary = {"vocabulary": tokenizer.backend_tokenizer.to_str(), "end": tokenizer.eos_token_id}
        if not self._send(vocabulary, _START_SECONDS):
            self.close()
            raise RequestError("grammars can't be tried out: the process for it doesn't start")

    def _send(self, message: dict[str, Any], seconds: float) -> bool:
        """Send a line to the child and wait for its answer; False if none comes in time."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return False
        ready, _, _ = select.select([self._child.stdout], [], [], seconds)
        answered = bool(ready) and self._child.stdout.readline() == "\n"
        if not answered and ready:  # its output was closed: it is ending
            self._child.wait()
        return answered


def _environment() -> dict[str, str]:
    """What the child needs of the environment to start: no keys of this server or of other services."""
    return {name: value for name, value in os.environ.items() if name.upper() in _INHERITED or name.startswith("LC_")}


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    if child.stdin is not None and child.stdout is not None:
        with contextlib.suppress(BrokenPipeError):  # of lines that it has never read
            child.stdin.close()
        child.stdout.close()
    child.wait()
