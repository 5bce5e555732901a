"""Statistics of drafts: how often their nodes are accepted, and how many candidates of which probability they offer.

`Acceptance` calibrates the drafter's probabilities. How often a child of an accepted node is accepted depends on the
drafter's probability for it and on whether it is the node's first child, but hardly on its depth, so all depths are
pooled. Frequencies start from a prior, decay with time, and are made non-increasing as the probability falls (isotonic
regression by pooling adjacent violators). The prior is the drafter's probability raised to a power, which is 1 for a
well calibrated drafter; this one number is learnt from few nodes, long before every bin has seen enough.

`Supply` counts the candidates that a row is offered, by depth and probability, for every beam width at once: a narrower
beam offers the first w children of each node, and its beam is the first w of those among the wider one. About levels
below the end of a draft only one thing is known: no deeper candidate is better than the best of the last level.

Shapes: G groups, K bins, n nodes, P powers; R rows, W widths of the grid, D depths, F frontier nodes, C children of a
level.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from eyas.tree.draft_tree import BeamCandidates
from eyas.tree.shared import SharedTree
from eyas.tree.values import BIN_CENTRES, BINS, ValueTable, bins

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

GROUPS = 2
"""Greedy rows and sampled rows have separate statistics: the Gumbel noise of a coupled drafter changes its scores."""
_PRIOR = 8.0
"""The number of nodes that the prior of a bin counts for."""
_POWERS: Array = 2.0 ** np.arange(-3.0, 2.01, 0.25)
"""[P] the powers considered: drafters are under- or overconfident."""
_DOUBT = 2.0
"""Weight, in log-likelihood an octave of power away, of the prior that the drafter is well calibrated."""
_FADE = 1.0 - 1.0 / 600.0
"""The factor by which counts decay each round."""
_SUPPLY_FADE = 1.0 - 1.0 / 80.0
"""The factor by which a draft's weight in `Supply` decays with each later one."""
_ROWS = 16
"""The most rows of a batch that `Supply` analyses at once; the others follow in later rounds."""
_PRIOR_CHILDREN = (0.75, 0.08, 0.04, 0.02, 0.015, 0.01, 0.008, 0.006, 0.005, 0.004, 0.003, 0.002)
"""The probabilities assumed for every node's children before any draft was seen."""


class Acceptance:
    """Counts of offered and accepted children of accepted nodes, and the acceptance rates that follow from them."""

    def __init__(self) -> None:
        self._offered: Array = np.zeros((GROUPS, 2, BINS))
        self._accepted: Array = np.zeros((GROUPS, 2, BINS))

    def learn(self, groups: Indices, later: Mask, bins: Indices, accepted: Mask) -> None:
        """Count verified nodes [n] whose parents were accepted.

        `later` [n]: whether the node is not its parent's first child; `accepted` [n]: whether it was accepted itself.
        """
        shape = self._offered.shape
        at = np.ravel_multi_index((groups, later.astype(np.int64), bins), shape)
        self._offered *= _FADE
        self._accepted *= _FADE
        self._offered += np.bincount(at, minlength=self._offered.size).reshape(shape)
        self._accepted += np.bincount(at, weights=accepted, minlength=self._offered.size).reshape(shape)

    def forget(self, kept: float) -> None:
        """Scale the weight of everything learnt so far by `kept`, from 0 to 1."""
        self._offered *= kept
        self._accepted *= kept

    def table(self) -> ValueTable:
        """The current acceptance rates, by group, first or later child, and probability."""
        weight = self._offered + _PRIOR
        values = (self._accepted + _PRIOR * self._prior()) / weight
        for at in np.ndindex(values.shape[:2]):
            values[at] = never_rising(values[at], weight[at])
        return ValueTable(values)

    def _prior(self) -> Array:
        """[G, 2, K] the drafter's probabilities, raised to the most likely power."""
        raised = np.exp(np.multiply.outer(_POWERS, BIN_CENTRES))  # [P, K]
        taken, refused = self._accepted[:, :, None], (self._offered - self._accepted)[:, :, None]  # [G, 2, 1, K]
        likelihood = (taken * np.log(raised) + refused * np.log1p(-raised)).sum(3) - _DOUBT * np.log2(_POWERS) ** 2
        out: Array = raised[likelihood.argmax(2)]
        return out


def never_rising(values: Array, weights: Array) -> Array:
    """The non-increasing sequence closest to `values` [K] by weighted least squares."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, mass, length = value, weight, 1
        while blocks and blocks[-1][0] < mean:
            other, other_mass, other_length = blocks.pop()
            mean = (mean * mass + other * other_mass) / (mass + other_mass)
            mass, length = mass + other_mass, length + other_length
        blocks.append((mean, mass, length))
    return np.concatenate([np.full(length, mean) for mean, _, length in blocks])


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

    def forget(self, kept: float) -> None:
        """Scale the weight of everything learnt so far by `kept`, from 0 to 1."""
        for array in (self._sums, self._weights, self._best_sums, self._best_weights):
            array *= kept

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
    spec = SharedTree(depth, width, 1, keeps_candidates=True)
    growth = spec.start(1, torch.device("cpu"))
    steps = torch.tensor(_PRIOR_CHILDREN[:width]).log()
    count = 1
    while (frontier := growth.expand(steps.repeat(1, count, 1), torch.zeros(1, count, width).long())) is not None:
        count = frontier.tokens.shape[1]
    offered = growth.tree().candidates
    assert offered is not None
    return offered
