"""What a step of a draft is worth: how often children with such a probability turn out to be accepted.

A path is worth the product of its steps. Probabilities are sorted into bins, fine near 1:
bin = floor(10 sqrt(-log p)). No step is worth more than 1, so a child never seems worth more than its parent.
Shapes: G groups of rows, K bins; B rows, W beam nodes, C children offered by each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BINS = 28
"""K: the last bin holds probabilities below exp(-7.3)."""
_FINENESS = 10.0
_TIE_BREAK = 1e-4
_LEAST = 1e-9
"""Stands for 0, whose logarithm is no number."""

Array = npt.NDArray[np.float64]


def bins(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """The bin of each log-probability."""
    root = np.sqrt(np.maximum(-scores, 0.0)) * _FINENESS
    found: npt.NDArray[np.int64] = np.minimum(root, BINS - 1).astype(np.int64)
    return found


BIN_EDGES: Array = -((np.arange(BINS + 1, dtype=np.float64) / _FINENESS) ** 2)
"""[K + 1] log-probabilities between which bins lie; the last one is open below."""
BIN_CENTRES: Array = -(((np.arange(BINS, dtype=np.float64) + 0.5) / _FINENESS) ** 2)
"""[K] a log-probability inside each bin."""


class ValueTable:
    """How often a step is accepted, by group, whether it leads to a node's first child, and bin of its probability."""

    def __init__(self, values: Array) -> None:  # [G, 2, K]: first children, then all others
        # never rising: neither with the bin nor from a first child to others, so that the best child stays the best
        self.values: Array = np.minimum.accumulate(np.minimum.accumulate(np.clip(values, _LEAST, 1.0), axis=1), axis=2)
        self._on: dict[torch.device, Tensor] = {}

    def look_up(self, steps: Tensor, groups: Tensor) -> Tensor:
        """[B, W, C] logarithms of what steps to children are worth.

        `steps` [B, W, C] are their log-probabilities, best first, `groups` [B] int64. Ties are broken by the
        log-probability itself.
        """
        flat = self._on.get(steps.device)
        if flat is None:
            flat = torch.tensor(np.log(self.values), dtype=torch.float32, device=steps.device).flatten()
            self._on[steps.device] = flat
        index = steps.neg().clamp_(min=0.0).sqrt_().mul_(_FINENESS).clamp_(max=BINS - 1).to(torch.int64)
        index[:, :, 1:] += BINS
        index += groups.view(-1, 1, 1) * (2 * BINS)
        return torch.add(flat[index], steps, alpha=_TIE_BREAK)
