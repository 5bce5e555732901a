"""The number of candidates that a drafter's network offers, by their probability.

`Supply` counts the candidates that a row is offered, by depth and probability, for every beam width. A wide beam shows
what a narrow one of width w would have offered: the first w children of each node in it, and of its next beam the first
w of those. Below the last level of a draft only one thing is known: no candidate is better than the best of that level.

Shapes: G groups, K bins; R rows, W widths of the grid, D depths, F frontier nodes, C children of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from eyas.tree.acceptance import GROUPS, Array, Indices
from eyas.tree.draft_tree import BeamCandidates
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import BIN_CENTERS, BINS, bins

_SUPPLY_FADE = 1.0 - 1.0 / 80.0
"""The factor by which a draft's weight in `Supply` decays with each later one."""
_ROWS = 16
"""The most rows of a batch that `Supply` analyzes at a time; the others follow in later rounds."""
_PRIOR_CHILDREN = (0.75, 0.08, 0.04, 0.02, 0.015, 0.01, 0.008, 0.006, 0.005, 0.004, 0.003, 0.002)
"""The values assumed for every node's children before any draft was seen."""
_GRADES: tuple[float, ...] = (0.75, 0.86, 0.95)
"""The values of a node's best child, because `_alike` takes 5 ms for each one; the first is the prior's."""


class Supply:
    """The average number of candidates that a row is offered, by group, beam width, depth and value.

    Where nothing was drafted yet, above all below the last level of all drafts, every node is assumed to have the
    children that roots have, because a drafter's confidence depends far less on depth than on the text. They are
    assumed to be no less likely than the prior's, so that a difficult text isn't given up before deeper drafts were
    seen.
    """

    def __init__(self, widths: Sequence[int], depth: int, prior_weight: float = 1.0) -> None:
        """`prior_weight`: the weight of the assumption, in drafts, before any draft was seen."""
        self.widths = tuple(widths)
        self._depth = depth
        self._prior_weight = prior_weight
        self._grid: Indices = np.array(widths)
        self._turn = 0
        # differences to the next narrower beam, so that narrow drafts also correct the forecasts of wide ones
        self._sums: Array = np.zeros((GROUPS, len(widths), depth, BINS))
        self._weights: Array = np.zeros((GROUPS, len(widths), depth, BINS))
        self._best_sums: Array = np.zeros((GROUPS, depth, BINS))
        self._best_weights: Array = np.zeros((GROUPS, depth, BINS))

    @property
    def counts(self) -> tuple[Array, Array, Array, Array]:
        """Sums and weights of candidates and of the best ones: the state, to be changed in place."""
        return self._sums, self._weights, self._best_sums, self._best_weights

    @property
    def rates(self) -> Array:
        """[G, W, D, K] the average number of candidates in a row."""
        assumed = np.stack([self._assumed(group)[0] for group in range(GROUPS)])
        more = _averages(self._sums, self._weights, assumed, self._prior_weight)
        out: Array = np.maximum(more.cumsum(1), 0.0)
        return out

    @property
    def best(self) -> Array:
        """[G, D, K] the distribution over bins of the best candidate at each depth."""
        assumed = np.stack([self._assumed(group)[1] for group in range(GROUPS)])
        return _averages(self._best_sums, self._best_weights, assumed, self._prior_weight)

    def _assumed(self, group: int) -> tuple[Array, Array]:
        """What a draft offers beyond narrower ones [W, D, K], and its best [D, K], if all nodes are like the roots."""
        seen = self._best_sums[group, 0]
        weight = float(self._best_weights[group, 0].max())
        first = (float(seen @ np.exp(BIN_CENTERS)) + _PRIOR_CHILDREN[0]) / (weight + 1.0)
        return _alike(self.widths, self._depth, min(_GRADES, key=lambda grade: abs(grade - first)))

    def prepare(self) -> None:
        """Count what nodes are assumed to offer, which takes as long as some rounds of a small target."""
        for grade in _GRADES:
            _alike(self.widths, self._depth, grade)

    def learn(self, offered: BeamCandidates, groups: Indices, drafting: npt.NDArray[np.bool_] | None = None) -> None:
        """Count a draft's candidates; `groups` [R]. Rows that aren't `drafting` [R] are left out."""
        rows = np.arange(len(groups)) if drafting is None else np.flatnonzero(drafting)
        if not len(rows):
            return
        step = -(-len(rows) // _ROWS)
        rows = rows[self._turn % step :: step]
        self._turn += 1
        group = groups[rows]
        grid = self._grid[self._grid <= offered.scores[0].shape[1]]
        seen, best = self._levels(offered, rows, group, grid)
        seen[:, 1:] -= seen[:, :-1].copy()
        levels = len(offered.scores)
        depth = self._sums.shape[2]
        # below the last level, no candidate is better than the best of that level
        beyond = np.arange(BINS) < best[levels - 1][:, None]  # [R, K]
        known = np.zeros((GROUPS, depth, BINS))
        for index in range(GROUPS):
            mine = group == index
            known[index, :levels] = mine.sum()
            known[index, levels:] = beyond[mine].sum(0)
        _fold(self._sums[:, : len(grid)], self._weights[:, : len(grid)], seen, known[:, None])
        tops = np.zeros((GROUPS, depth, BINS))
        for level, found in enumerate(best):
            counts = np.bincount(group * BINS + found, minlength=GROUPS * BINS)
            tops[:, level] = counts.reshape(GROUPS, BINS)
        _fold(self._best_sums, self._best_weights, tops, known)

    def _levels(
        self, offered: BeamCandidates, rows: Indices, group: Indices, grid: Indices
    ) -> tuple[Array, list[Indices]]:
        """Counts [G, W', D, K] of the candidates for each width of `grid` [W'], and each level's best bin [R]."""
        shape = (GROUPS, len(grid), self._sums.shape[2], BINS)
        seen = np.zeros(shape)
        fanout = offered.scores[0].shape[1]
        ranked = np.arange(fanout)[:, None] < grid  # [fanout, W']: a child of this rank is offered
        mine = np.broadcast_to(ranked, (len(rows), *ranked.shape))  # [R, C, W']
        best = []
        for level, scores in enumerate(offered.scores):
            found = bins(scores.numpy()[rows])  # [R, C]
            best.append(found.min(1))
            if level < shape[2]:
                at = (group[:, None, None] * len(grid) + np.arange(len(grid))) * BINS + found[:, :, None]  # [R, C, W']
                counts = np.bincount(at[mine], minlength=GROUPS * len(grid) * BINS)
                seen[:, :, level] += counts.reshape(GROUPS, len(grid), BINS)
            if level < len(offered.beams):
                beam = offered.beams[level].numpy()[rows]  # [R, F]
                in_beam = np.take_along_axis(mine, beam[:, :, None], axis=1)  # [R, F, W']
                in_beam = in_beam & (in_beam.cumsum(1) <= grid)
                mine = (in_beam[:, :, None] & ranked).reshape(len(rows), -1, len(grid))
        return seen, best[: shape[2]]


def _averages(sums: Array, weights: Array, assumed: Array, prior_weight: float) -> Array:
    """Averages over drafts and a prior, `assumed`, whose weight fades out as drafts are counted."""
    part = prior_weight * np.maximum(1.0 - (1.0 - _SUPPLY_FADE) * weights, 0.0)  # fades like a draft that came first
    out: Array = (sums + part * assumed) / np.maximum(weights + part, 1e-9)
    return out


def _fold(sums: Array, weights: Array, seen: Array, known: Array) -> None:
    """Add a draft's counts; sums and weights decay only where it is `known`."""
    fade = np.where(known > 0, _SUPPLY_FADE, 1.0)
    sums *= fade
    weights *= fade
    sums += np.where(known > 0, seen, 0.0)
    weights += known


@lru_cache(maxsize=32)
def _alike(widths: tuple[int, ...], depth: int, first: float) -> tuple[Array, Array]:
    """The counts of a draft in which every node has the same children, the best of value `first`."""
    others = (1.0 - first) / (1.0 - _PRIOR_CHILDREN[0])
    children = [first, *(min(first, others * value) for value in _PRIOR_CHILDREN[1 : widths[-1]])]
    growth = PlannedTree(SharedTree(depth, widths[-1], 1), keeps_candidates=True).start(1, torch.device("cpu"))
    count = 1
    while (
        frontier := growth.expand(
            torch.tensor(children).log().repeat(1, count, 1), torch.zeros(1, count, widths[-1]).long()
        )
    ) is not None:
        count = frontier.tokens.shape[1]
    offered = growth.tree().network.candidates
    assert offered is not None
    made = Supply(widths, depth, prior_weight=0.0)
    made.learn(offered, np.zeros(1, dtype=np.int64))
    return made.counts[0][0], made.counts[2][0]
