"""A conversation keeps its cache between turns: only what is new is prefilled."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.engine.engine import Engine
from eyas.errors import UsageError
from eyas.types import Chunk, Request


class Conversation:
    """Turns of one chat on an engine of batch size 1, which it has for itself."""

    def __init__(self, engine: Engine) -> None:
        if engine.batch_size != 1:
            raise UsageError("a conversation needs an engine with batch size 1")
        self._engine = engine
        self._held: list[int] = []

    def turn(self, request: Request) -> Iterator[Chunk]:
        """Stream the answer to a prompt that (usually) continues the last one."""
        self._held = []  # if the caller stops half-way nothing is known to be held
        emitted: list[int] = []
        for chunk in self._engine.stream([request]):
            emitted += chunk.token_ids
            yield chunk
        self._held = [*request.prompt, *emitted]

    def _common(self, prompt: tuple[int, ...]) -> int:
        """Tokens that needn't be prefilled again.

        One less than the shared prefix: the drafter's last pair needs the token after it to be the same too. And
        two less than the prompt: of all pairs the drafter keeps only the last one's state, so that one is read anew.
        """
        shared = 0
        for old, new in zip(self._held, prompt, strict=False):
            if old != new:
                break
            shared += 1
        return max(0, min(shared - 1, len(prompt) - 2, self._engine.target.cache.lengths[0] if self._held else 0))
