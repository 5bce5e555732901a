"""The gain model: expected nodes and accepted tokens of every tree shape, learnt from the drafts made.

A node is kept where its value, the chance that it is accepted, reaches a threshold; so a shape is a beam width, a depth
and a threshold, and what a batch keeps is the sum of what its rows offer above it. That every row's average offer adds
up is exact for the mean, whatever the rows are like.
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
"""[L] the thresholds of node values that shapes differ in."""
_TOP, _BOTTOM = BIN_EDGES[:-1, None], np.maximum(BIN_EDGES[1:, None], np.log(THRESHOLDS))  # [K, 1], [K, L]
_KEPT: Array = np.maximum(_TOP - _BOTTOM, 0.0) / (_TOP - BIN_EDGES[1:, None])
"""[K, L] the part of a bin that reaches a threshold."""
_WORTH: Array = _KEPT * np.exp((_TOP + _BOTTOM) / 2)
"""[K, L] the value of those nodes together."""
_TRIAL = 12
"""Rounds after which forecasts are judged."""
_SURPRISE = 4.0
"""Deviations (of as many independent tokens) beyond which forecasts are wrong; tokens of a path go together."""
_AFTER_SURPRISE = 0.3


class Forecast(NamedTuple):
    """What a round of a batch is expected to bring, by shape."""

    nodes: Array  # [W, D, L] in the whole batch
    accepted: Array  # [W, D, L] draft tokens, likewise
    levels: Array  # [D, L] levels that will be drafted before no row has anything worth going on from


class GainModel:
    """Acceptance rates and candidate counts, and the forecast that follows from both."""

    def __init__(self, widths: Sequence[int], depth: int) -> None:
        self.widths, self.depth = tuple(widths), depth
        self._acceptance, self._supply = Acceptance(), Supply(widths, depth)
        self.values: ValueTable = self._acceptance.table()
        self._promised, self._kept, self._judged = 0.0, 0.0, 0

    def learn(self, draft: VerifiedDraft, groups: Indices, drafting: Sequence[bool] | None) -> None:
        """Learn from a verified draft, and from its candidates where they were kept; `groups` [R]."""
        tree = draft.tree
        alive = np.ones(len(groups), dtype=np.bool_) if drafting is None else np.array(drafting, dtype=np.bool_)
        if tree.candidates is not None:
            self._supply.learn(tree.candidates, groups, alive)
        elif tree.valid.device.type != "cpu":
            return  # reading the device costs a sync
        valid = tree.valid.cpu().numpy()
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
        """A round was forecast to accept `promised` draft tokens and accepted `kept`.

        If forecasts are wrong for a while by far more than chance, the text has changed: the old one is soon forgotten.
        """
        self._promised, self._kept, self._judged = self._promised + promised, self._kept + kept, self._judged + 1
        if self._judged < _TRIAL:
            return
        if abs(self._kept - self._promised) > _SURPRISE * math.sqrt(self._promised + 1.0):
            self._supply.forget(_AFTER_SURPRISE)
            self._acceptance.forget(_AFTER_SURPRISE)
        self._promised, self._kept, self._judged = 0.0, 0.0, 0

    def settle(self) -> None:
        """Let what was learnt about values count from now on."""
        self.values = self._acceptance.table()

    def forecast(self, group_rows: Sequence[int]) -> Forecast:
        """For a batch of `group_rows` [G] rows of each group."""
        rates, best = self._supply.rates, self._supply.best
        shape = (len(self.widths), self.depth, len(THRESHOLDS))
        nodes, accepted = np.zeros(shape), np.zeros(shape)
        idle = np.ones(shape[1:])  # [D, L] the chance that no row has anything worth a level more
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
