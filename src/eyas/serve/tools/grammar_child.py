"""The process that tries grammars out: `python -m eyas.serve.grammar_child`, spoken to by `GrammarTrials`.

A line of JSON comes in, {"vocabulary": tokenizer.json, "end": id} first, then {"source": ..., "limits": ...}; an empty
line goes out when it is done. Whatever a grammar does to this process, the server lives.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from typing import Any

_STACK = 4 << 20
"""Bytes: half of what the server's threads have, so what passes here has room there."""
_MEMORY = 8 << 30
"""Bytes of address space."""
_STEPS = 16


def _serve() -> None:
    import llguidance

    vocabulary: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "vocabulary" in asked:
            vocabulary = llguidance.LLTokenizer(asked["vocabulary"], eos_token=asked["end"])
        else:
            _follow(llguidance, vocabulary, asked["source"], asked["limits"])
        sys.stdout.write("\n")
        sys.stdout.flush()


def _follow(library: Any, vocabulary: Any, source: str, limits: dict[str, Any]) -> None:
    """Compile a grammar and take a few steps in it."""
    matcher = library.LLMatcher(vocabulary, source, log_level=0, limits=library.LLParserLimits(**limits))
    draw = random.Random(0)
    for _ in range(_STEPS):
        mask = matcher.compute_bitmask()
        legal = [8 * at + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]
        if matcher.is_error() or matcher.is_stopped() or not legal:
            return
        matcher.consume_token(draw.choice(legal))


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    _limit_memory()
    threading.stack_size(_STACK)
    worker = threading.Thread(target=_serve)
    worker.start()
    parent = os.getppid()
    while worker.is_alive() and os.getppid() == parent:  # a server that was killed can't end it
        worker.join(1.0)
    os._exit(0)
