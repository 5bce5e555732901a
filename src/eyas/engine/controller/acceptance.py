"""What path probabilities are worth: how often verified nodes were accepted, by group, depth and bin, on the fly.

Frequencies start from a prior (the drafter is right about itself), fade with time, never rise as the probability falls
(pooled adjacent violators), and differ between depths by one factor a depth.
Shapes: G groups, D depths, K bins, n nodes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eyas.tree.values import BIN_CENTRES, BINS, ValueTable

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

GROUPS = 2
"""Greedy rows and rows with a temperature: the noise that a coupled drafter shares changes what its numbers mean."""
_PRIOR_BIN = 12.0
"""Nodes that the prior of a bin counts for."""
_PRIOR_DEPTH = 30.0
"""Expected acceptances that the prior of a depth's factor counts for."""
_FADE = 1.0 - 1.0 / 600.0
"""What is left of a count after a round."""


class Acceptance:
    """Offered and accepted nodes."""

    def __init__(self, depth: int) -> None:
        self._offered: Array = np.zeros((GROUPS, depth, BINS))
        self._accepted: Array = np.zeros((GROUPS, depth, BINS))

    def learn(self, groups: Indices, depths: Indices, bins: Indices, accepted: npt.NDArray[np.bool_]) -> None:
        """Verified nodes [n], depth 1 = the root's children, and whether each was walked."""
        shape = self._offered.shape
        at = np.ravel_multi_index((groups, np.minimum(depths, shape[1]) - 1, bins), shape)
        self._offered *= _FADE
        self._accepted *= _FADE
        self._offered += np.bincount(at, minlength=self._offered.size).reshape(shape)
        self._accepted += np.bincount(at, weights=accepted, minlength=self._offered.size).reshape(shape)

    def forget(self, kept: float) -> None:
        """Let what was learnt weigh only `kept` of what it did."""
        self._offered *= kept
        self._accepted *= kept

    def table(self) -> ValueTable:
        """The values as they stand."""
        offered, accepted = self._offered.sum(1), self._accepted.sum(1)  # [G, K]
        weight = offered + _PRIOR_BIN
        pooled = (accepted + _PRIOR_BIN * np.exp(BIN_CENTRES)) / weight
        pooled = np.stack([never_rising(value, mass) for value, mass in zip(pooled, weight, strict=True)])
        expected = (self._offered * pooled[:, None]).sum(2)  # [G, D]
        factor = (self._accepted.sum(2) + _PRIOR_DEPTH) / (expected + _PRIOR_DEPTH)
        return ValueTable(np.minimum(pooled[:, None] * factor[:, :, None], 1.0))


def never_rising(values: Array, weights: Array) -> Array:
    """The closest sequence to `values` [K] that never rises (weighted least squares)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, mass, length = value, weight, 1
        while blocks and blocks[-1][0] < mean:
            other, other_mass, other_length = blocks.pop()
            mean = (mean * mass + other * other_mass) / (mass + other_mass)
            mass, length = mass + other_mass, length + other_length
        blocks.append((mean, mass, length))
    return np.concatenate([np.full(length, mean) for mean, _, length in blocks])
