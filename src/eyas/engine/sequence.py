"""One running request: what it has emitted and when it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas.types import Request, Stats


@dataclass
class RunningSequence:
    """A request in a slot."""

    index: int
    """Its place in the caller's list."""
    request: Request
    limit: int
    """Most tokens it may emit."""
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None

    @property
    def root(self) -> int:
        """Its last token, which the next pass starts from."""
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]

    def extend(self, tokens: Sequence[int], accepted: int, offered: int, seconds: float) -> list[int]:
        """Take a round's tokens up to the first stop token or the limit; returns those taken."""
        self.stats.record(accepted, offered)
        self.stats.decode_seconds += seconds
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
        self.stats.tokens += len(taken)
        return taken
