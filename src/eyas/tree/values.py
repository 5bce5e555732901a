"""What a draft node is worth: how often nodes of its depth and path probability turn out to be accepted.

Path probabilities are sorted into bins, fine near 1: bin = floor(10 sqrt(-log p)). Looking a bin up is exactly monotone
(every step is a correctly rounded monotone operation), so a child never seems worth more than its parent.
Shapes: G groups of rows, D depths, K bins; B rows, M candidates.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BINS = 28
"""K: the last bin holds path probabilities below exp(-7.3)."""
_FINENESS = 10.0
_TIE_BREAK = 1e-4

Array = npt.NDArray[np.float64]


def bins(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """The bin of each log-probability."""
    root = np.sqrt(np.maximum(-scores, 0.0)) * _FINENESS
    found: npt.NDArray[np.int64] = np.minimum(root, BINS - 1).astype(np.int64)
    return found


def bin_floor(index: int) -> float:
    """The log-probability above which all of bin `index` lies; minus infinity for the last."""
    return -math.inf if index >= BINS - 1 else -(((index + 1) / _FINENESS) ** 2)


BIN_CENTRES: Array = -(((np.arange(BINS, dtype=np.float64) + 0.5) / _FINENESS) ** 2)
"""[K] a log-probability inside each bin."""


class ValueTable:
    """Acceptance by group, depth and bin; never rises with depth or bin."""

    def __init__(self, values: Array) -> None:  # [G, D, K]
        self.values: Array = np.minimum.accumulate(np.minimum.accumulate(values, axis=1), axis=2)
        self._on: dict[torch.device, Tensor] = {}

    @property
    def depth(self) -> int:
        """D; deeper nodes are worth what the deepest row says."""
        return int(self.values.shape[1])

    def floor(self, group: int, depth: int, threshold: float) -> float:
        """The log-probability below which no node of `depth` (1 = the root's children) is worth `threshold`."""
        worth = np.flatnonzero(self.values[group, min(depth, self.depth) - 1] >= threshold)
        return bin_floor(int(worth[-1])) if len(worth) else math.inf

    def look_up(self, scores: Tensor, depths: Tensor, groups: Tensor) -> Tensor:
        """[B, M] float32 values of candidates with log-probabilities `scores` [B, M] at `depths` [M] (1 = first)."""
        flat = self._on.get(scores.device)
        if flat is None:
            flat = torch.tensor(self.values, dtype=torch.float32, device=scores.device).flatten()
            self._on[scores.device] = flat
        index = scores.neg().clamp_(min=0.0).sqrt_().mul_(_FINENESS).clamp_(max=BINS - 1).to(torch.int64)
        index += (depths.clamp(max=self.depth) - 1) * BINS + groups.unsqueeze(1) * (self.depth * BINS)
        return flat[index]


def ranking(values: Tensor, scores: Tensor) -> Tensor:
    """`values` with ties broken by `scores`, as exactly monotone as both."""
    return torch.add(values, scores, alpha=_TIE_BREAK)
