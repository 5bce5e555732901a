"""The observer behind the playground's gauges: the engine's last state and totals of its rounds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyas.runtime import busy, machine_load
from eyas.serve.observe.observer import Observer
from eyas.types import CONTEXT_BUCKETS, context_bucket

if TYPE_CHECKING:
    from eyas.engine.controller import ControllerState
    from eyas.engine.round import RoundOutput
    from eyas.types import EngineState


@dataclass(frozen=True)
class _Totals:
    """Sums since the server started, replaced as a whole: one thread writes them and another reads."""

    tokens: int = 0
    row_rounds: tuple[int, ...] = (0,) * len(CONTEXT_BUCKETS)
    """By context: entry i is of bucket i, as in `accepted`."""
    accepted: tuple[int, ...] = (0,) * len(CONTEXT_BUCKETS)

    def plus(self, outcome: RoundOutput) -> _Totals:
        tokens = sum(len(emitted) for emitted in outcome.tokens)
        rounds, accepted = list(self.row_rounds), list(self.accepted)
        for count, context in zip(outcome.accepted, outcome.contexts, strict=True):
            rounds[context_bucket(context)] += 1
            accepted[context_bucket(context)] += count
        return _Totals(self.tokens + tokens, tuple(rounds), tuple(accepted))


class Gauges(Observer):
    """Keeps the state after the engine's last step and the totals of all its rounds."""

    def __init__(self) -> None:
        self._totals = _Totals()
        self._state: EngineState | None = None
        self._controller: ControllerState | None = None

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        """Keep the state and add the round to the totals."""
        self._state, self._controller = state, controller
        if outcome is not None:
            self._totals = self._totals.plus(outcome)

    def read(self) -> dict[str, Any]:
        """The JSON of `/stats`: the page makes rates of two readings by their totals and their `seconds`.

        `busy` says why times can't be trusted now, or is null.
        """
        totals, state, controller = self._totals, self._state, self._controller
        return {
            "seconds": time.monotonic(),
            "running": state.running if state else 0,
            "waiting": state.waiting if state else 0,
            "prefilling": state.prefilling if state else 0,
            "cached_tokens": state.cached_tokens if state else 0,
            "cache_limit": state.cache_limit if state else None,
            "tokens_total": totals.tokens,
            "row_rounds_total": sum(totals.row_rounds),
            "accepted_total": sum(totals.accepted),
            "by_context": {
                name: {"row_rounds_total": rounds, "accepted_total": accepted}
                for name, rounds, accepted in zip(CONTEXT_BUCKETS, totals.row_rounds, totals.accepted, strict=True)
                if rounds
            },
            "busy": busy(machine_load()),
            "tree": {"depth": controller.depth, "width": controller.width, "budget": controller.budget}
            if controller
            else None,
        }
