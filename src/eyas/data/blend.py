"""Sources in fixed proportions, chat by chat; the same seed gives the same chats whatever the order of the rows."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def rank(seed: int, chat_id: str) -> int:
    """A chat's place in its source's shuffled order, 64 bits: by its id, so that rows can be added or reordered."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{chat_id}".encode()).digest()[:8], "big")


def take_turns(
    sources: Sequence[Iterator[T]], weights: Sequence[float], total: int | None, strict: bool
) -> Iterator[tuple[int, T]]:
    """(source, item) in turns: at any moment each source has had its weight's share of them, to within one.

    Ends after `total` items, or with everything. If `strict`, no source gets more than its share because another runs
    dry: that one's turns are lost, and without a `total` the blend ends there.
    """
    # a source's turn k = 0, 1, ... is due at (k + 1/2) / weight
    due = [(0.5 / weight, i, 0) for i, weight in enumerate(weights)]
    heapq.heapify(due)
    dry: set[int] = set()
    turns = 0
    while due and len(dry) < len(sources) and (total is None or turns < total):
        _, source, taken = heapq.heappop(due)
        item = None if source in dry else next(sources[source], None)
        if item is None:
            dry.add(source)
            if strict and total is None:
                return
        else:
            yield source, item
        if item is not None or strict:
            turns += 1
            heapq.heappush(due, ((taken + 1.5) / weights[source], source, taken + 1))
