"""A race on one machine: the lanes take turns, round by round, and each is charged only its own time.

The lane whose clock is behind moves next, so what a spectator sees at any moment is what both would have written in
the same time, had each had the machine for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eyas.data.detokenizer import Detokenizer
from eyas.engine import Engine
from eyas.types import Completion, Request


@dataclass
class Lane:
    """One contestant."""

    name: str
    engine: Engine
    """Not sharing its target's slots with another lane's."""
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """Text so far; True = a draft token that was accepted."""
    tokens: int = 0
    seconds: float = 0.0
    """Prefill included: what a spectator waits for."""
    completion: Completion | None = None


def race(lanes: Sequence[Lane], request: Request, moved: Callable[[], None]) -> None:
    """Run `request` in every lane to the end; `moved` is called after each round, on nobody's time."""
    streams = [lane.engine.stream([request]) for lane in lanes]
    texts = [Detokenizer(lane.engine.tokenizer) for lane in lanes]
    for lane in lanes:
        lane.pieces, lane.tokens, lane.seconds, lane.completion = [], 0, 0.0, None
    while any(lane.completion is None for lane in lanes):
        behind = min((i for i, lane in enumerate(lanes) if lane.completion is None), key=lambda i: lanes[i].seconds)
        lane, text = lanes[behind], texts[behind]
        began = time.perf_counter()
        chunk = next(streams[behind])
        lane.seconds += time.perf_counter() - began
        lane.tokens += len(chunk.token_ids)
        for place, token in enumerate(chunk.token_ids):
            lane.pieces.append((text.push(token), place < chunk.accepted))
        if chunk.completion is not None:
            lane.pieces.append((text.finish(), False))
            lane.completion = chunk.completion
        moved()
