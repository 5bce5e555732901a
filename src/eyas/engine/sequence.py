"""One request on its way: what it has emitted, how much of it is cached, when it is finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eyas.types import Request, Stats, TokenLogprobs

if TYPE_CHECKING:
    from eyas.verify import Grammar


@dataclass(eq=False)
class SequenceState:
    """A request that waits or runs. `slot` and `cached` are the scheduler's."""

    index: int
    """The order of arrival."""
    request: Request
    limit: int
    """Most tokens it may emit."""
    stop_ids: frozenset[int] = frozenset()
    key: str = ""
    """Whom it is queued for: keys share the slots fairly."""
    expires: float | None = None
    """When its deadline passes, on the scheduler's clock."""
    grammar: Grammar | None = None
    """What its answer must look like."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of its tokens, if the request wants them."""
    error: str | None = None
    """Why it can't go on, where that is its own affair."""
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    slot: int | None = None
    """None = not in a slot."""
    cached: int = 0
    """Tokens of it that its slot holds."""
    arrived: float = field(default_factory=time.monotonic)

    @property
    def root(self) -> int:
        """Its last token, which the next pass starts from."""
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]

    @property
    def known(self) -> int:
        """Tokens that must be cached before it can decode: all but the root."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def unread(self) -> int:
        """Tokens left to prefill."""
        return max(0, self.known - self.cached)

    @property
    def longest(self) -> int:
        """Most tokens it can come to, prompt and answer."""
        return len(self.request.prompt) + self.limit

    def window(self, start: int, stop: int) -> list[int]:
        """Its tokens `[start, stop)`, prompt and answer."""
        size = len(self.request.prompt)
        return [*self.request.prompt[start:stop], *self.tokens[max(0, start - size) : max(0, stop - size)]]

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Take a round's tokens up to the first stop token or the limit; returns those taken."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) + len(taken) >= self.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        self.tokens.extend(taken)
        return taken
