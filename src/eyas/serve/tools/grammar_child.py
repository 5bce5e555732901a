"""The child process in which `GrammarTrials` compiles grammars: `python -m eyas.serve.tools.grammar_child`.

It reads lines of JSON, first {"vocabulary": tokenizer.json, "end": id}, then {"source": ..., "limits": ...}. It answers
each with a line: why the grammar can't be used, or an empty one if it can. Whatever a grammar does to this process, the
server survives.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from typing import Any

_STACK = 4 << 20
"""Stack of the compiling thread in bytes: half of a server thread's, so what compiles here compiles there."""
_MEMORY = 8 << 30
"""Maximum address space of the process, in bytes."""
_STEPS = 512
"""How many tokens are drawn from a compiled grammar: with an ambiguous one, each costs more than the last."""
_SECONDS_PER_STEP, _LEAST_SECONDS = 0.005, 0.25
"""CPU time that a token may take on average, and the total that is always allowed; others in a round wait for it."""


def _answer_lines() -> None:
    import llguidance

    tokenizer: Any = None
    for line in sys.stdin:
        message, problem = json.loads(line), ""
        if "vocabulary" in message:
            tokenizer = llguidance.LLTokenizer(message["vocabulary"], eos_token=message["end"])
        else:
            problem = _try(llguidance, tokenizer, message["source"], message["limits"])
        sys.stdout.write(f"{problem}\n")
        sys.stdout.flush()


def _try(library: Any, tokenizer: Any, source: str, limits: dict[str, Any]) -> str:
    """Compile a grammar and draw some tokens from it; return why it can't be used, or an empty string.

    Errors that show before the first token are left to the server's compiler, whose message is better.
    """
    matcher = library.LLMatcher(tokenizer, source, log_level=0, limits=library.LLParserLimits(**limits))
    draw, began = random.Random(0), time.thread_time()
    for step in range(_STEPS):
        mask = matcher.compute_bitmask()
        legal = [8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        if matcher.is_error():
            return "it reaches a limit after a few tokens" if step else ""
        if matcher.is_stopped() or not legal:
            return ""
        matcher.consume_token(draw.choice(legal))
        used = time.thread_time() - began
        if used > max(_LEAST_SECONDS, _SECONDS_PER_STEP * (step + 1)):
            return f"it is ambiguous or large: a token takes {1000 * used / (step + 1):.0f} ms"
    return ""


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
