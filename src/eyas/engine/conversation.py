"""A conversation: each turn reads only what is new since the one before."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.engine.engine import Engine
from eyas.types import Chunk, Request

_TOKENS = 32768
"""Kept where the model doesn't say how long a context may become."""


class Conversation:
    """Turns of one chat. An engine may have several, and other requests beside them."""

    def __init__(self, engine: Engine) -> None:
        engine.reuse_prefixes(engine.target.max_length or _TOKENS)
        self._engine = engine

    def turn(self, request: Request) -> Iterator[Chunk]:
        """Stream the answer to a prompt that (usually) continues the last one."""
        yield from self._engine.stream([request])
