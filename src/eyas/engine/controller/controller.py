"""The controller: before each round, the tree shape that promises the most tokens per second, or none."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.engine.controller.record import ControllerState, RoundRecord
from eyas.tree import TreeSpec


class Controller:
    """Plans each round's tree and learns from how it went."""

    def __init__(self) -> None:
        self._state = ControllerState()

    def plan(self, rows: int, lengths: Sequence[int], sampled: Sequence[bool] | None = None) -> TreeSpec | None:
        """The tree for a round of `rows` rows that hold `lengths` committed tokens each; None = plain.

        `sampled` says which rows have a temperature above 0; None = none has.
        """
        del rows, lengths, sampled
        return None

    def learn(self, record: RoundRecord) -> None:
        """Take in how a round went."""
        del record

    def snapshot(self) -> ControllerState:
        """What it does now, for metrics."""
        return self._state
