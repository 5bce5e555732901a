"""What a draft's steps are worth: how often children of accepted nodes were accepted, on the fly.

A step's frequency depends on the drafter's probability for it, on whether it leads to the node's first child, and
hardly on its depth; so all depths learn together. Frequencies start from a prior, fade with time, and never rise as the
probability falls (pooled adjacent violators). The prior is the drafter's probability to a power, 1 if it is right about
itself; the power, one number, is learnt from few nodes, long before every bin has seen enough.
Shapes: G groups, K bins, n nodes, P powers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eyas.tree.values import BIN_CENTRES, BINS, ValueTable

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

GROUPS = 2
"""Greedy rows and rows with a temperature: the noise that a coupled drafter shares changes what its numbers mean."""
_PRIOR = 8.0
"""Nodes that the prior of a bin counts for."""
_POWERS: Array = 2.0 ** np.arange(-3.0, 2.01, 0.25)
"""[P] what probabilities may have to be raised to: drafters are less sure than they could be, or more."""
_DOUBT = 2.0
"""Weight (in log-likelihood, an octave of power away) of the opinion that the drafter is right about itself."""
_FADE = 1.0 - 1.0 / 600.0
"""What is left of a count after a round."""


class Acceptance:
    """Offered and accepted children of accepted nodes."""

    def __init__(self) -> None:
        self._offered: Array = np.zeros((GROUPS, 2, BINS))
        self._accepted: Array = np.zeros((GROUPS, 2, BINS))

    def learn(self, groups: Indices, later: Mask, bins: Indices, accepted: Mask) -> None:
        """Verified nodes [n] whose parents were walked: `later` siblings or first ones, and whether each was walked."""
        shape = self._offered.shape
        at = np.ravel_multi_index((groups, later.astype(np.int64), bins), shape)
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
        weight = self._offered + _PRIOR
        values = (self._accepted + _PRIOR * self._told()) / weight
        for at in np.ndindex(values.shape[:2]):
            values[at] = never_rising(values[at], weight[at])
        return ValueTable(values)

    def _told(self) -> Array:
        """[G, 2, K] what the drafter's probabilities mean: raised to the likeliest power."""
        told = np.exp(np.multiply.outer(_POWERS, BIN_CENTRES))  # [P, K]
        taken, refused = self._accepted[:, :, None], (self._offered - self._accepted)[:, :, None]  # [G, 2, 1, K]
        likelihood = (taken * np.log(told) + refused * np.log1p(-told)).sum(3) - _DOUBT * np.log2(_POWERS) ** 2
        out: Array = told[likelihood.argmax(2)]
        return out


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
