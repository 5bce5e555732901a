"""The gain model: the expected nodes and accepted tokens of every tree shape, learned from earlier drafts.

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
import torch

from eyas.engine.controller.experience import Experience
from eyas.engine.controller.supply import Supply
from eyas.engine.round import VerifiedDraft
from eyas.tree.acceptance import GROUPS, Acceptance, Array, Indices
from eyas.tree.draft_tree import DraftTree, Source, TreeSpec
from eyas.tree.union import path_values
from eyas.tree.values import BIN_EDGES, ValueTable

_LOW = (0.02, 0.03, 0.045, 0.065, 0.09, 0.12, 0.16, 0.2, 0.25, 0.3, 0.36, 0.42)
_HIGH = (0.48, 0.54, 0.6, 0.66, 0.72, 0.78, 0.83, 0.87, 0.905, 0.935, 0.96, 0.98)
THRESHOLDS: Array = np.array(_LOW + _HIGH)
"""[L] the thresholds of node values among which shapes choose."""
_TOP, _BOTTOM = BIN_EDGES[:-1, None], np.maximum(BIN_EDGES[1:, None], np.log(THRESHOLDS))  # [K, 1], [K, L]
_KEPT: Array = np.maximum(_TOP - _BOTTOM, 0.0) / (_TOP - BIN_EDGES[1:, None])
"""[K, L] the share of a bin's nodes that reach a threshold."""
_WORTH: Array = _KEPT * np.exp((_TOP + _BOTTOM) / 2)
"""[K, L] the average value of a bin's nodes, counting those below the threshold as 0."""
_TYPICAL = 5.0
"""The forecast tokens of a row after which its own results weigh as much as what is known of all texts."""
_USUAL, _USUAL_FADE = 60.0, 1.0 - 1.0 / 500.0
"""The same for forecasts of all texts, which may be consistently too high or low; and how their results decay."""
_HOPE = 0.25
"""The spread of texts' yields, as a share: a new text gets the benefit of the doubt."""
_LEAST_YIELD, _MOST_YIELD = 0.1, 2.0
_LEARNT = ("offered", "accepted", "sums", "weights", "best_sums", "best_weights", "usual")
_RESUMED, _RENEWED, _VALUED = 0.5, 256, 64
"""The weight of what an earlier model has learned; drafts after which what was learned is saved again; drafts after
which node values are updated at the latest."""
_YIELD_FADE, _RESTING_FADE = 1.0 - 1.0 / 64.0, 1.0 - 1.0 / 256.0
"""The factors by which a row's own results decay each round, with a draft and without."""
_FOUND_TRIAL, _FOUND_SURPRISE, _AFTER_FOUND = 6, 2.0, 0.1
"""Rounds after which the promise of copies is compared with results; the standard deviations beyond which it was wrong;
the weight that what was learned about copies then keeps, as copied passages end suddenly."""


class Forecast(NamedTuple):
    """The expected result of a round, by shape."""

    nodes: Array  # [W, D, L] in the whole batch
    accepted: Array  # [W, D, L] draft tokens, likewise
    levels: Array  # [D, L] levels that are drafted until no row has a node worth extending


class GainModel:
    """Forecasts the nodes and accepted tokens of all shapes from acceptance rates and candidate counts."""

    def __init__(self, widths: Sequence[int], depth: int, sources: int = 1) -> None:
        """For trees of up to `depth` levels and beams of `widths`, whose nodes come from `sources` sources."""
        self.widths, self.depth = tuple(widths), depth
        self._acceptance, self._supply = Acceptance(GROUPS * sources), Supply(widths, depth)
        self.values: ValueTable = self._acceptance.table()
        self._found_surplus, self._found_variance, self._found_judged = 0.0, 0.0, 0
        self._own_forecast, self._own_accepted, self._yield = 0.0, 0.0, 1.0
        self._shown = 0.0
        """The tokens forecast so far for the texts being written: how much is known about their yield."""
        self._usual_forecast, self._usual_accepted = 0.0, 0.0
        self._experience: Experience | None = None
        self._learnt_rounds = 0
        """Drafts since what was learned was last saved."""
        self._drafts = self._valued = 0
        """Drafts so far, and drafts that node values account for."""

    def learn(self, draft: VerifiedDraft, groups: Indices, drafting: Sequence[bool] | None) -> None:
        """Learn from a verified draft, and from its candidates if they were kept; `groups` [R]."""
        if draft.tree.candidates is not None:
            alive = np.ones(len(groups), dtype=np.bool_) if drafting is None else np.array(drafting, dtype=np.bool_)
            self._supply.learn(draft.tree.candidates, groups, alive)
        self._acceptance.learn_tree(draft.tree, draft.paths, groups)
        self._learnt_rounds += 1
        self._drafts += 1

    @property
    def _learnt(self) -> dict[str, Array]:
        """What was learned about the drafter, by name."""
        usual = np.array((self._usual_forecast, self._usual_accepted))
        return dict(zip(_LEARNT, (*self._acceptance.counts, *self._supply.counts, usual), strict=True))

    def keep(self) -> None:
        """Save what was learned, now that there is time, if it is enough."""
        if self._experience is not None and self._learnt_rounds >= _RENEWED:
            self._experience.write(self._learnt)
            self._learnt_rounds = 0

    def resume(self, experience: Experience) -> None:
        """Continue from `experience` at half its weight, as texts may have changed; save there what this model learns.

        What a model of other shapes has learned is ignored.
        """
        self._experience = experience
        learnt, own = experience.read(), self._learnt
        if learnt.keys() != own.keys() or any(learnt[name].shape != own[name].shape for name in own):
            return
        for name, state in own.items():
            state[:] = _RESUMED * learnt[name]
        self._usual_forecast, self._usual_accepted = map(float, own["usual"])
        self.settle()

    def renew(self, share: float) -> None:
        """Forget the yield of the texts being written, for the `share` of rows that have new ones."""
        self._own_forecast *= 1.0 - share
        self._own_accepted *= 1.0 - share
        self._shown *= 1.0 - share

    def rest(self) -> None:
        """Account for a round without a draft."""
        self._own_forecast *= _RESTING_FADE
        self._own_accepted *= _RESTING_FADE

    @property
    def drift(self) -> float:
        """What the texts being written yield now, compared with what the last forecast assumed."""
        return self._current_yield / self._yield

    @property
    def _current_yield(self) -> float:
        """Accepted tokens per forecast one: a Gamma prior around what is usual, and what these rows' rounds brought."""
        ratio = (self._own_accepted + _TYPICAL) / (self._own_forecast + _TYPICAL)
        return self._usual * min(max(ratio, _LEAST_YIELD), _MOST_YIELD)

    @property
    def _usual(self) -> float:
        """The same for all texts: the shape that promises the most is often one whose forecast is too high."""
        return (self._usual_accepted + _USUAL) / (self._usual_forecast + _USUAL)

    def hope(self, rows: int) -> float:
        """The factor by which the texts of `rows` rows may well yield more than expected, until results are in."""
        return 1.0 + _HOPE * _TYPICAL / ((self._shown + _TYPICAL) * math.sqrt(rows))

    def judge(self, promised: float, kept: float, rows: int) -> None:
        """Compare the `promised` accepted draft tokens of a round of `rows` rows with the `kept` ones.

        Texts differ, so what these rows yield is learned within some rounds, and soon forgotten when others follow.
        """
        forecast, accepted = promised / self._yield / rows, kept / rows
        usual = self._usual
        self._shown += forecast * usual
        self._own_forecast = self._own_forecast * _YIELD_FADE + forecast * usual
        self._own_accepted = self._own_accepted * _YIELD_FADE + accepted
        self._usual_forecast = self._usual_forecast * _USUAL_FADE + forecast
        self._usual_accepted = self._usual_accepted * _USUAL_FADE + accepted

    def judge_found(self, promised: float, kept: float) -> None:
        """Compare the accepted tokens `promised` by a round's copied nodes with those `kept`.

        A passage is copied to its end or not at all, so a round's result varies as much as it promises.
        """
        self._found_surplus += kept - promised
        self._found_variance += promised * (promised + 1.0)
        self._found_judged += 1
        if self._found_judged < _FOUND_TRIAL:
            return
        if abs(self._found_surplus) > _FOUND_SURPRISE * math.sqrt(self._found_variance):
            self._acceptance.forget(_AFTER_FOUND, slice(Source.LOOKUP, None))
        self._found_surplus, self._found_variance, self._found_judged = 0.0, 0.0, 0

    def settle(self, *, values: bool = True) -> None:
        """Base forecasts on what the texts being written yield now, and on what is known about nodes.

        Node values are updated if `values` is set, or once there were a thirty-second more drafts: making them takes a
        tenth of a small pass.
        """
        if values or self._drafts - self._valued >= min(_VALUED, self._drafts // 32):
            self.values, self._valued = self._acceptance.table(), self._drafts
        self._yield = self._current_yield

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
            nodes += rows * self._yield * (rates[group] @ _KEPT)
            accepted += rows * np.minimum(self._yield * (rates[group] @ _WORTH), 1.0)
            reach = np.minimum(self._yield * (best[group] @ _KEPT), 1.0)  # [D, L]
            idle *= (1.0 - reach) ** rows
        # level 1 is always drafted, level d + 1 if some row's best at depth d goes on
        goes_on = np.minimum.accumulate(1.0 - idle, axis=0)
        levels = 1.0 + np.concatenate((np.zeros((1, shape[2])), goes_on[:-1].cumsum(0)))
        return Forecast(nodes.cumsum(1), accepted.cumsum(1), levels)


def found_values(tree: DraftTree, spec: TreeSpec, groups: Indices) -> float:
    """The accepted tokens that a tree's copied nodes promised together."""
    if tree.sources is None or not tree.size:
        return 0.0
    if tree.copies_promise is not None:
        return tree.copies_promise
    values = path_values(tree, spec.values, torch.from_numpy(groups).to(tree.tokens.device)).exp()
    return float(values[tree.valid & (tree.sources == Source.LOOKUP)].sum())
