"""What a step of a draft is worth: how often children with such a probability turn out to be accepted.

A path is worth the product of its steps. Probabilities are sorted into bins, fine near 1:
bin = floor(10 sqrt(-log p)). No step is worth more than 1, so a child never seems worth more than its parent.
Shapes: G groups of rows, K bins; B rows, W beam nodes, C children offered by each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


# Which candidates of a batch are worth verifying, given what nodes cost and what it costs that rows differ.
#
# Attention pads all rows of a pass to the longest, so one easy row's long tree is paid for by all; as many nodes dealt
# out equally cost no padding, and bring a little less. Both, and everything between, are tried: for each number of
# nodes that a row may have at most, the best candidates of all rows in order of value, as many as pay. Shapes: B rows,
# M candidates of a row.


class NodeChoice(NamedTuple):
    """The `nodes` best candidates of those that are among the `per_row` best of their rows."""

    per_row: int
    nodes: int


def most_profitable(values: Array, prices: Sequence[float], padding_prices: Sequence[float] | None) -> NodeChoice:
    """The choice whose value exceeds its price by the most; no nodes if none does.

    values [B, M] of the candidates, 0 = out of the question; `prices`: what 1, 2, ... nodes must bring together, more
    are not to be had; `padding_prices`: likewise for places padded (None = they are free), the last holds beyond.
    """
    rows = len(values)
    most = int((values > 0.0).sum(1).max())
    ranked = -np.sort(-values, axis=1)
    asked, padding = np.asarray(prices), np.concatenate(([0.0], padding_prices or (0.0,)))
    best, choice = 0.0, NodeChoice(most, 0)
    # without a price on padding a limit can only take value away
    for per_row in (most,) if padding_prices is None else range(1, most + 1):
        offered = np.sort(ranked[:, :per_row], axis=None)[::-1]
        offered = offered[offered > 0.0][: len(asked)]
        padded = rows * per_row - np.arange(1, len(offered) + 1)
        profit = offered.cumsum() - asked[: len(offered)] - padding[np.minimum(padded, len(padding) - 1)]
        if len(profit) and profit.max() > best:
            best, choice = float(profit.max()), NodeChoice(per_row, int(profit.argmax()) + 1)
    return choice
