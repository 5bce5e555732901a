"""Which candidates of a batch are worth verifying, given what nodes cost and what it costs that rows differ.

Attention pads all rows of a pass to the longest, so one easy row's long tree is paid for by all; as many nodes dealt
out equally cost no padding, and bring a little less. Both, and everything between, are tried: for each number of nodes
that a row may have at most, the best candidates of all rows in order of value, as many as pay.
Shapes: B rows, M candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Choice(NamedTuple):
    """The `nodes` best candidates of those that are among the `per_row` best of their rows."""

    per_row: int
    nodes: int


def most_profitable(values: Array, prices: Sequence[float], padding_prices: Sequence[float] | None) -> Choice:
    """The choice whose value exceeds its price by the most; no nodes if none does.

    values [B, M] of the candidates, 0 = out of the question; `prices`: what 1, 2, ... nodes must bring together, more
    are not to be had; `padding_prices`: likewise for places padded (None = they are free), the last holds beyond.
    """
    rows = len(values)
    most = int((values > 0.0).sum(1).max())
    ranked = -np.sort(-values, axis=1)
    asked, padding = np.asarray(prices), np.concatenate(([0.0], padding_prices or (0.0,)))
    best, choice = 0.0, Choice(most, 0)
    # without a price on padding a limit can only take value away
    for per_row in (most,) if padding_prices is None else range(1, most + 1):
        offered = np.sort(ranked[:, :per_row], axis=None)[::-1]
        offered = offered[offered > 0.0][: len(asked)]
        padded = rows * per_row - np.arange(1, len(offered) + 1)
        profit = offered.cumsum() - asked[: len(offered)] - padding[np.minimum(padded, len(padding) - 1)]
        if len(profit) and profit.max() > best:
            best, choice = float(profit.max()), Choice(per_row, int(profit.argmax()) + 1)
    return choice
