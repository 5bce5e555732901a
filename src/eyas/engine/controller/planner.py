"""The planner: computes the expected tokens per second of all tree shapes together and finds the fastest.

tokens per second = (R + accepted) / (draft(R, width, levels) + pass(R + nodes, columns) + observe(R + accepted))

A drafter in use also reads new prompts, so the time for that is spread over the generated tokens. Where a round selects
its nodes after drafting, rows differ in length, and the cost of padding is added. Chains of equal length need no
padding; they replace the chains with the lowest threshold.

Shapes: W widths, D depths, L thresholds, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from eyas.engine.controller.costs import CostModel
from eyas.engine.controller.gain import Forecast
from eyas.engine.controller.texts import SHARES
from eyas.tree.acceptance import Array
from eyas.tree.dynamic import DynamicTree

_LONGEST = 2.0
"""Assumed ratio of the longest row's nodes to the average row's."""
_MANY = 64
"""The number of pairs from which the time per pair is that of a long prompt."""
_LARGEST = 64
"""The most tokens of a row's tree, its root included, that are recorded."""


class Shape(NamedTuple):
    """A tree shape as indices: of the width, of the depth (depth - 1), and of the threshold."""

    width: int
    depth: int
    threshold: int


class Prospect(NamedTuple):
    """The forecast of a round of the whole batch with one shape."""

    shape: Shape
    nodes: float
    accepted: float
    """Accepted draft tokens; each row emits one token more."""
    seconds: float
    rate: float
    """Expected tokens per second, over all rows."""

    def drifted(self, factor: float, rows: int) -> Prospect:
        """The same forecast, with the rate at which `factor` times its tokens are accepted."""
        return self._replace(rate=(rows + self.accepted * factor) / self.seconds)

    def recurring_tree(self, width: int, rows: int) -> DynamicTree:
        """The shape as an accelerator records it: the same number of nodes in each row, 1, 3, 7, ... or 63."""
        nodes = min(1 << math.ceil(self.nodes / rows).bit_length(), _LARGEST) - 1
        return DynamicTree(min(self.shape.depth + 1, nodes), width, nodes)


class Prospects:
    """The forecasts of all shapes, and of plain decoding, for one batch."""

    def __init__(
        self,
        forecast: Forecast,
        costs: CostModel,
        widths: Sequence[int],
        rows: int,
        lengths: Sequence[int],
        *,
        depth: int,
        stops_early: bool,
        prompt_pairs: float = 0.0,
    ) -> None:
        """Forecast all shapes up to `depth`. `stops_early`: whether drafting ends once no node is worth extending.

        `prompt_pairs` is how many pairs of prompts a drafter in use has to read for each token that is generated.
        """
        self._nodes = forecast.nodes[:, :depth].copy()
        self._accepted = forecast.accepted[:, :depth]
        full = np.broadcast_to(np.arange(1.0, depth + 1)[:, None], self._nodes.shape)
        levels = np.broadcast_to(forecast.levels[:depth], full.shape).copy() if stops_early else full
        padded = np.zeros_like(self._nodes)
        if stops_early and rows > 1:
            longest = np.maximum(levels, _LONGEST / rows * self._nodes)
            padded = np.maximum(rows * longest - self._nodes, 0.0)
            # width 1 with the lowest threshold stands for chains of equal length, without padding
            levels[0, :, 0] = full[0, :, 0]
            padded[0, :, 0] = 0.0
            self._nodes[0, :, 0] = rows * full[0, :, 0]
        width = np.array(widths, dtype=np.float64)[:, None, None]
        self._seconds: Array = (
            costs.pass_seconds(rows + self._nodes, rows, lengths)
            + costs.padding_seconds(padded, rows)
            + costs.draft_seconds(rows, width, levels)
            + costs.observe_seconds(rows + self._accepted, rows)
            + costs.overhead
        )
        # prompts are read many pairs at a time
        self.reading = prompt_pairs * costs.reading_seconds(_MANY, rows) / _MANY if prompt_pairs else 0.0
        """The seconds for which a drafter in use reads prompts, for each token that is generated."""
        self._seconds += (rows + self._accepted) * self.reading
        self._rate: Array = (rows + self._accepted) / self._seconds
        self._pass = partial(costs.pass_seconds, rows=rows, lengths=lengths)
        self._padding = partial(costs.padding_seconds, rows=rows)
        self._draft = partial(costs.draft_seconds, rows)
        self.rows = rows
        self._known: dict[Shape, Prospect] = {}
        self._added: dict[int, Array] = {}  # seconds of 1, 2, ... nodes, by the requested count
        self._padded: dict[int, Array] = {}  # of padded positions, likewise
        self.plain_seconds = costs.plain_seconds(rows, lengths)
        self.catching_up = float(costs.observe_seconds(rows, rows))
        """The additional seconds of a plain round between drafts, because the next draft has to read its pairs."""
        self.plain_rate = rows / self.plain_seconds

    @cached_property
    def best(self) -> Prospect:
        """The fastest speculating shape."""
        at = np.unravel_index(int(self._rate.argmax()), self._rate.shape)
        return self.of(Shape(int(at[0]), int(at[1]), int(at[2])))

    @property
    def trial(self) -> Prospect:
        """A short chain with the lowest threshold, which shows at little cost whether the texts are guessed.

        With the threshold that pays best, too few nodes would be verified to distinguish texts.
        """
        return self.of(Shape(0, min(self.best.shape.depth, 1), 0))

    @cached_property
    def saved_by_share(self) -> Array:
        """[S] the seconds that the best chain saves with each token, if it saves any, where the drafter guesses each
        of `SHARES` [S] of the tokens that follow right ones."""
        tokens = (SHARES[:, None] ** np.arange(self._seconds.shape[1] + 1)).cumsum(1)[:, 1:]  # [S, D] of a row
        return self.saved((self.rows * tokens / self._seconds[0, :, 0]).max(1))

    def saved(self, rates: Array) -> Array:
        """The seconds that a token takes less at these `rates`, in tokens per second, than in plain rounds; or 0."""
        seconds: Array = np.maximum(1.0 / self.plain_rate - 1.0 / rates, 0.0)
        return seconds

    def of(self, shape: Shape) -> Prospect:
        """The forecast of a shape, cut to the greatest depth considered."""
        at = shape._replace(depth=min(shape.depth, self._rate.shape[1] - 1))
        found = self._known.get(at)
        if found is None:
            tables = (self._nodes, self._accepted, self._seconds, self._rate)
            found = self._known[at] = Prospect(at, *(float(table[at]) for table in tables))
        return found

    def prices(self, rate: float, count: int) -> tuple[float, ...]:
        """The tokens generated at `rate` per second in the time that 1, 2, ... `count` nodes add to the pass."""
        added = self._added.get(count)
        if added is None:
            added = self._added[count] = self._pass(self.rows + np.arange(1.0, count + 1)) - self.plain_seconds
        return tuple((rate * added).tolist())

    def added(self, nodes: float) -> float:
        """The seconds that `nodes` nodes add to the pass."""
        return float(self._pass(np.array([float(self.rows + nodes)]))[0]) - self.plain_seconds

    def level_seconds(self, width: int) -> float:
        """The seconds of a further level with a beam of `width`."""
        return float(self._draft(width, 2.0) - self._draft(width, 1.0))

    def padding_prices(self, rate: float, count: int) -> tuple[float, ...]:
        """The tokens generated at `rate` per second in the time that 1, 2, ... `count` padded positions add."""
        added = self._padded.get(count)
        if added is None:
            added = self._padded[count] = self._padding(np.arange(1.0, count + 1))
        return tuple((rate * added).tolist())

    def larger(self, shape: Shape, wider: int = 0, deeper: int = 0, lower: int = 0) -> Prospect:
        """The forecast of a shape some steps larger, within the grid; its candidates include those of `shape`."""
        return self.of(
            Shape(
                min(shape.width + wider, self._rate.shape[0] - 1),
                min(shape.depth + deeper, self._rate.shape[1] - 1),
                max(shape.threshold - lower, 0),
            )
        )
