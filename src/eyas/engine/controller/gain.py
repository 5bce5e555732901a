"""The gain model: the expected nodes and accepted tokens of every tree shape, learnt from earlier drafts.

A node is kept if its value, the probability that it is accepted, reaches a threshold. So a shape consists of a beam
width, a depth and a threshold, and a batch keeps the sum of what its rows offer above the threshold. Multiplying the
average row by the number of rows gives the exact mean, however much rows differ.
Shapes: G groups, W widths, D depths, K bins, L thresholds, R rows, N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eyas.engine.controller.acceptance import GROUPS, Acceptance, Array, Indices, Supply
from eyas.engine.round import VerifiedDraft
from eyas.tree.values import BIN_EDGES, ValueTable, bins

_LOW = (0.02, 0.03, 0.045, 0.065, 0.09, 0.12, 0.16, 0.2, 0.25, 0.3, 0.36, 0.42)
_HIGH = (0.48, 0.54, 0.6, 0.66, 0.72, 0.78, 0.83, 0.87, 0.905, 0.935, 0.96, 0.98)
THRESHOLDS: Array = np.array(_LOW + _HIGH)
"""[L] the thresholds of node values among which shapes choose."""
_TOP, _BOTTOM = BIN_EDGES[:-1, None], np.maximum(BIN_EDGES[1:, None], np.log(THRESHOLDS))  # [K, 1], [K, L]
_KEPT: Array = np.maximum(_TOP - _BOTTOM, 0.0) / (_TOP - BIN_EDGES[1:, None])
"""[K, L] the share of a bin's nodes that reach a threshold."""
_WORTH: Array = _KEPT * np.exp((_TOP + _BOTTOM) / 2)
"""[K, L] the average value of a bin's nodes, counting those below the threshold as 0."""
_TRIAL = 12
"""Rounds after which forecasts are compared with results."""
_SURPRISE = 4.0
"""Standard deviations, as if tokens were independent, beyond which forecasts are considered wrong."""
_AFTER_SURPRISE = 0.3
"""The weight that everything learnt so far keeps after such a surprise."""


class Forecast(NamedTuple):
    """The expected result of a round, by shape."""

    nodes: Array  # [W, D, L] in the whole batch
    accepted: Array  # [W, D, L] draft tokens, likewise
    levels: Array  # [D, L] levels that are drafted until no row has a node worth extending


class GainModel:
    """Forecasts the nodes and accepted tokens of all shapes from acceptance rates and candidate counts."""

    def __init__(self, widths: Sequence[int], depth: int) -> None:
        self.widths, self.depth = tuple(widths), depth
        self._acceptance, self._supply = Acceptance(), Supply(widths, depth)
        self.values: ValueTable = self._acceptance.table()
        self._promised, self._kept, self._judged = 0.0, 0.0, 0

    def learn(self, draft: VerifiedDraft, groups: Indices, drafting: Sequence[bool] | None) -> None:
        """Learn from a verified draft, and from its candidates if they were kept; `groups` [R]."""
        tree = draft.tree
        alive = np.ones(len(groups), dtype=np.bool_) if drafting is None else np.array(drafting, dtype=np.bool_)
        if tree.candidates is not None:
            self._supply.learn(tree.candidates, groups, alive)
        elif tree.valid.device.type != "cpu":
            return  # reading the device costs a sync
        valid = tree.acceptable.cpu().numpy()
        walked = np.zeros((len(groups), tree.size + 1), dtype=np.bool_)
        for row, path in enumerate(draft.paths):
            walked[row, path] = True
        if not valid.any():
            return
        logprob, parents = tree.logprob.double().cpu().numpy(), tree.parents.cpu().numpy()
        above = np.take_along_axis(np.pad(logprob, ((0, 0), (1, 0))), parents + 1, axis=1)  # [R, N]
        tested = valid & np.take_along_axis(walked, parents + 1, axis=1)
        at, node = np.nonzero(tested)
        same_parent = tested[at] & (parents[at] == parents[at, node][:, None])  # [n, N]
        later = same_parent.argmax(1) < node
        self._acceptance.learn(groups[at], later, bins((logprob - above)[at, node]), walked[at, node + 1])

    def judge(self, promised: float, kept: float) -> None:
        """Compare the `promised` accepted draft tokens of a round with the `kept` ones.

        If forecasts are wrong over several rounds by far more than chance, the text has changed, and everything learnt
        from the old one loses most of its weight.
        """
        self._promised, self._kept, self._judged = self._promised + promised, self._kept + kept, self._judged + 1
        if self._judged < _TRIAL:
            return
        if abs(self._kept - self._promised) > _SURPRISE * math.sqrt(self._promised + 1.0):
            self._supply.forget(_AFTER_SURPRISE)
            self._acceptance.forget(_AFTER_SURPRISE)
        self._promised, self._kept, self._judged = 0.0, 0.0, 0

    def settle(self) -> None:
        """Update node values with everything learnt so far."""
        self.values = self._acceptance.table()

    def forecast(self, group_rows: Sequence[int]) -> Forecast:
        """The forecast for a batch with `group_rows` [G] rows of each group."""
        rates, best = self._supply.rates, self._supply.best
        shape = (len(self.widths), self.depth, len(THRESHOLDS))
        nodes, accepted = np.zeros(shape), np.zeros(shape)
        idle = np.ones(shape[1:])  # [D, L] the probability that no row has a node worth another level
        for group in range(GROUPS):
            rows = group_rows[group]
            if not rows:
                continue
            nodes += rows * (rates[group] @ _KEPT)
            accepted += rows * (rates[group] @ _WORTH)
            reach = np.minimum(best[group] @ _KEPT, 1.0)  # [D, L]
            idle *= (1.0 - reach) ** rows
        # level 1 is always drafted, level d + 1 if some row's best at depth d goes on
        goes_on = np.minimum.accumulate(1.0 - idle, axis=0)
        levels = 1.0 + np.concatenate((np.zeros((1, shape[2])), goes_on[:-1].cumsum(0)))
        return Forecast(nodes.cumsum(1), accepted.cumsum(1), levels)
