"""The number of candidates that a drafter's network offers, by their probability.

`Supply` counts the candidates that a row is offered, by depth and probability, for every beam width: a narrower
beam offers the first w children of each node, and its beam is the first w of those among the wider one. About levels
below the end of a draft only one thing is known: no deeper candidate is better than the best of the last level.

Shapes: G groups, K bins; R rows, W widths of the grid, D depths, F frontier nodes, C children of a level.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from eyas.tree.acceptance import GROUPS, Array, Indices
from eyas.tree.draft_tree import BeamCandidates
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import BINS, bins

_SUPPLY_FADE = 1.0 - 1.0 / 80.0
"""The factor by which a draft's weight in `Supply` decays with each later one."""
_ROWS = 16
"""The most rows of a batch that `Supply` analyzes at a time; the others follow in later rounds."""
_PRIOR_CHILDREN = (0.75, 0.08, 0.04, 0.02, 0.015, 0.01, 0.008, 0.006, 0.005, 0.004, 0.003, 0.002)
"""The probabilities assumed for every node's children before any draft was seen."""


class Supply:
    """The average number of candidates that a row is offered, by group, beam width, depth and probability."""

    def __init__(self, widths: Sequence[int], depth: int) -> None:
        self.widths = tuple(widths)
        self._grid: Indices = np.array(widths)
        self._turn = 0
        # what a beam offers beyond the next narrower one, so that narrow drafts correct the forecast of wide ones too
        self._sums: Array = np.zeros((GROUPS, len(widths), depth, BINS))
        self._weights: Array = np.zeros((GROUPS, len(widths), depth, BINS))
        self._best_sums: Array = np.zeros((GROUPS, depth, BINS))
        self._best_weights: Array = np.zeros((GROUPS, depth, BINS))
        prior = _prior(self.widths[-1], depth)
        for group in range(GROUPS):
            self.learn(prior, np.array([group]))

    @property
    def counts(self) -> tuple[Array, Array, Array, Array]:
        """Sums and weights of candidates and of the best ones: the state, to be changed in place."""
        return self._sums, self._weights, self._best_sums, self._best_weights

    @property
    def rates(self) -> Array:
        """[G, W, D, K] the average number of candidates in a row."""
        more = self._sums / np.maximum(self._weights, 1e-9)
        out: Array = np.maximum(more.cumsum(1), 0.0)
        return out

    @property
    def best(self) -> Array:
        """[G, D, K] the distribution over bins of the best candidate at each depth."""
        return self._best_sums / np.maximum(self._best_weights, 1e-9)

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
        levels, depth = len(offered.scores), self._sums.shape[2]
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
                goes_on = np.take_along_axis(mine, beam[:, :, None], axis=1)  # [R, F, W']
                goes_on = goes_on & (goes_on.cumsum(1) <= grid)
                mine = (goes_on[:, :, None] & ranked).reshape(len(rows), -1, len(grid))
        return seen, best[: shape[2]]


def _fold(sums: Array, weights: Array, seen: Array, known: Array) -> None:
    """Add a draft's counts; sums and weights decay only where it is `known`."""
    fade = np.where(known > 0, _SUPPLY_FADE, 1.0)
    sums *= fade
    weights *= fade
    sums += np.where(known > 0, seen, 0.0)
    weights += known


def _prior(width: int, depth: int) -> BeamCandidates:
    """A draft in which every node has the same children, counted before any real one."""
    spec = PlannedTree(SharedTree(depth, width, 1), keeps_candidates=True)
    growth = spec.start(1, torch.device("cpu"))
    steps = torch.tensor(_PRIOR_CHILDREN[:width]).log()
    count = 1
    while (frontier := growth.expand(steps.repeat(1, count, 1), torch.zeros(1, count, width).long())) is not None:
        count = frontier.tokens.shape[1]
    offered = growth.tree().candidates
    assert offered is not None
    return offered
