"""The arm of lookahead decoding, whose window runs as a whole or not at all.

A window can't be sized by its nodes' values, because its scratch nodes are never accepted, yet the n-grams of later
rounds come from all of them. Scratch nodes and candidates both count as nodes. The accepted tokens and the nodes of a
row are running averages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from eyas.engine.controller.arms import Batch, DraftArm
from eyas.engine.controller.costs import CostModel
from eyas.engine.controller.explore import Explorer
from eyas.engine.controller.gain import Forecast
from eyas.engine.controller.planner import Prospect, Prospects, Shape
from eyas.engine.controller.records import RoundRecord
from eyas.tree import TreeSpec
from eyas.tree.acceptance import Array
from eyas.tree.lookahead import LookaheadTree

_GUESS, _GUESSED = 0.5, 16.0
"""Tokens that a row is assumed to accept in a round before any was seen (published: 0.5 to 1), and the weight of this
assumption, in rounds of one row."""
_FADE = 1.0 - 1.0 / 50.0
"""The factor by which running averages decay with each round."""
_TRIAL = 4
"""Rounds of a trial for each level of the window, because the window takes one round per level to fill."""
_ACCEPTED: Array = (np.arange(32) + 0.5) / 8
"""[S] the average numbers of tokens that a row may accept, for which the probability is known."""


class WindowGain:
    """Running averages of what rows with a window accept, and of their nodes."""

    known = True

    def __init__(self, window: LookaheadTree) -> None:
        self._rows = _GUESSED
        self._accepted = _GUESS * _GUESSED
        self._nodes = window.max_nodes * _GUESSED
        self._assumed = _GUESS
        self._rested = 0
        """Plain rounds since the last window."""

    @property
    def drift(self) -> float:
        return self._accepted / self._rows / self._assumed if self._assumed else 1.0

    def accepts(self) -> Array:
        """[S] the probability of each average number of accepted tokens (Gamma distribution); what is known fades
        while no windows run."""
        weight = _FADE**self._rested
        accepted, rows = weight * self._accepted + _GUESS, weight * self._rows + 1.0
        logs = (accepted - 1.0) * np.log(_ACCEPTED) - rows * _ACCEPTED
        density = np.exp(logs - logs.max())
        probabilities: Array = density / density.sum()
        return probabilities

    def follow(self, texts: Sequence[int]) -> None:  # noqa: ARG002
        return

    def keep(self) -> None:
        return

    def settle(self, *, values: bool = True) -> None:  # noqa: ARG002
        self._assumed = self._accepted / self._rows

    def forecast(self, rows: int) -> Forecast:
        """The forecast for a batch of `rows` rows."""
        nodes, accepted = (rows * part / self._rows for part in (self._nodes, self._accepted))
        return Forecast(np.full((1, 1, 1), nodes), np.full((1, 1, 1), accepted), np.ones((1, 1)))

    def learn(self, record: RoundRecord) -> None:
        """Account for a round of any kind."""
        if record.draft is None:
            self._rested += 1
            return
        kept = _FADE ** (1 + self._rested)
        drafting = record.rows if record.drafting is None else sum(record.drafting)
        self._rows = self._rows * kept + drafting
        self._accepted = self._accepted * kept + record.emitted - record.rows
        self._nodes = self._nodes * kept + record.tokens - record.rows
        self._rested = 0


class WindowArm(DraftArm):
    """Windows, in every row of a round or in none."""

    depth = 1  # a window runs in one pass, so a plan sees a single level

    def __init__(self, window: LookaheadTree) -> None:
        self._window = window
        self.gain: WindowGain = WindowGain(window)
        self.texts = self.gain
        self.explorer = Explorer(_TRIAL * window.depth)

    def prospects(self, batch: Batch, costs: CostModel, prompt_pairs: float) -> Prospects:  # noqa: ARG002
        forecast = self.gain.forecast(batch.rows)
        return Prospects(
            forecast, costs, (self._window.max_fanout,), batch.rows, batch.lengths, depth=1, stops_early=False
        )

    def saved(self, prospects: Prospects) -> float:
        rates = prospects.rows * (1.0 + _ACCEPTED) / prospects.best.seconds
        return float(self.gain.accepts() @ prospects.saved(rates))

    def tree(self, prospect: Prospect | None, batch: Batch, *, probing: bool) -> TreeSpec:  # noqa: ARG002
        return self._window

    def learn(self, record: RoundRecord, judged: Prospect | None, clock: Callable[[], float]) -> int:  # noqa: ARG002
        self.gain.learn(record)
        return record.emitted - record.rows

    def width_of(self, spec: TreeSpec) -> int:  # noqa: ARG002
        return self._window.window

    def size(self, shape: Shape) -> tuple[int, int]:  # noqa: ARG002
        return self._window.depth, self._window.window
