"""The child process in which `GrammarTrials` compiles grammars: `python -m eyas.serve.tools.grammar_child`.

It reads lines of JSON, first {"vocabulary": tokenizer.json, "end": id}, then {"source": ..., "limits": ..., "seconds":
...}. It answers each with a line: why the grammar can't be used, or an empty one if it can. A grammar that needs more
than these seconds of processor time ends the process with SIGPROF. So no grammar can crash the server.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

_STACK = 4 << 20
"""Stack of the compiling thread in bytes. It is half of a server thread's, so that what compiles here compiles
there."""
_MEMORY = 8 << 30
"""Maximum address space of the process, in bytes."""
_STEPS = 512
"""How many tokens are drawn from a compiled grammar: an ambiguous one reaches llguidance's limits on the way."""
_TRIAL_SECONDS = 0.5
"""Processor time for drawing them; what hasn't reached a limit by then is accepted."""


def _answer_lines() -> None:
    import llguidance

    tokenizer: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        problem = ""
        if "vocabulary" in message:
            tokenizer = llguidance.LLTokenizer(message["vocabulary"], eos_token=message["end"])
        else:
            # processor time, not wall time, because the machine may be busy. The timer's signal ends the process even
            # while llguidance doesn't return
            signal.setitimer(signal.ITIMER_PROF, message["seconds"])
            problem = _try(llguidance, tokenizer, message["source"], message["limits"])
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(f"{problem}\n")
        sys.stdout.flush()


def _try(library: Any, tokenizer: Any, source: str, limits: dict[str, Any]) -> str:
    """Compile a grammar and draw some tokens from it; return why it can't be used, or an empty string.

    Errors that show before the first token are left to the server's compiler, whose message is better.
    """
    matcher = library.LLMatcher(tokenizer, source, log_level=0, limits=library.LLParserLimits(**limits))
    draw = np.random.default_rng(0)
    end = time.thread_time() + _TRIAL_SECONDS
    for step in range(_STEPS):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            return f"after {step} tokens, {_first_line(matcher.get_error())}" if step else ""
        legal = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.is_stopped() or not legal.size or time.thread_time() > end:
            return ""
        matcher.consume_token(int(draw.choice(legal)))
    return ""


def _first_line(message: str) -> str:
    return message.replace("<non-verbose/>", "").strip().partition("\n")[0]


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
