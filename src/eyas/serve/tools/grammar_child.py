"""The child process in which `GrammarTrials` compiles grammars: `python -m eyas.serve.tools.grammar_child`.

It reads lines of JSON, {"vocabulary": tokenizer.json, "end": id} first, then {"source": ..., "limits": ...}, and
answers each with an empty line when it is done. Whatever a grammar does to this process, the server lives.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from typing import Any

_STACK = 4 << 20
"""Stack of the compiling thread in bytes: half of a server thread's, so what compiles here compiles there."""
_MEMORY = 8 << 30
"""Most address space of the process, in bytes."""
_STEPS = 16
"""How many tokens are drawn from a compiled grammar."""


def _answer_lines() -> None:
    import llguidance

    tokenizer: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        if "vocabulary" in message:
            tokenizer = llguidance.LLTokenizer(message["vocabulary"], eos_token=message["end"])
        else:
            _try(llguidance, tokenizer, message["source"], message["limits"])
        sys.stdout.write("\n")
        sys.stdout.flush()


def _try(library: Any, tokenizer: Any, source: str, limits: dict[str, Any]) -> None:
    """Compile a grammar and draw a few tokens from it."""
    matcher = library.LLMatcher(tokenizer, source, log_level=0, limits=library.LLParserLimits(**limits))
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
    worker = threading.Thread(target=_answer_lines)
    worker.start()
    parent = os.getppid()
    while worker.is_alive() and os.getppid() == parent:  # a server that was killed doesn't end its children
        worker.join(1.0)
    os._exit(0)
