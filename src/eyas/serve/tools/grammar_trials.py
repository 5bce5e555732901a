"""Grammars from strangers are tried out in another process before they may be compiled here.

llguidance counts what it does, but not everything: a schema of a few hundred characters can keep its compiler busy for
hours, and a long chain of rules overflows its stack, which ends the process. Here that process is a child's.
"""

from __future__ import annotations

import contextlib
import json
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

_SECONDS = 5.0
_START_SECONDS = 60.0
_KEPT = 1024


class GrammarTrials:
    """One child, started for the first grammar and again after one has broken it; it ends with this process."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = Lock()
        self._child: subprocess.Popen[str] | None = None
        self._passed: OrderedDict[GrammarSpec, None] = OrderedDict()

    def check(self, tokenizer: Any, spec: GrammarSpec) -> None:
        """Compile a grammar, where it can do no harm first. RequestError, UsageError. One at a time."""
        source = grammar_source(spec)
        with self._lock:
            if spec not in self._passed:
                self._try(tokenizer, source)
                self._passed[spec] = None
                if len(self._passed) > _KEPT:
                    self._passed.popitem(last=False)
        compile_grammar(tokenizer, spec)

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            _end(child)

    def _try(self, tokenizer: Any, source: str) -> None:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._start(tokenizer)
        answered = self._ask({"source": source, "limits": LIMITS}, self._seconds)
        if not answered:
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
        )
        weakref.finalize(self, _end, self._child)
        vocabulary = {"vocabulary": tokenizer.backend_tokenizer.to_str(), "end": tokenizer.eos_token_id}
        if not self._ask(vocabulary, _START_SECONDS):
            self.close()
            raise RequestError("grammars can't be tried out: the process for it doesn't start")

    def _ask(self, question: dict[str, Any], seconds: float) -> bool:
        """Send a line and wait for the answer; False if none comes in time."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return False
        ready, _, _ = select.select([self._child.stdout], [], [], seconds)
        answered = bool(ready) and self._child.stdout.readline() == "\n"
        if not answered and ready:  # its end was closed: it is dying
            self._child.wait()
        return answered


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    if child.stdin is not None and child.stdout is not None:
        with contextlib.suppress(BrokenPipeError):  # of what was never read
            child.stdin.close()
        child.stdout.close()
    child.wait()
