"""The values of draft nodes, and which nodes to verify given the cost of verification.

The value of a step to a child is the rate at which children of similar probability are accepted; a path's value is the
product of its steps'. Probabilities are sorted into bins that are fine near 1: bin = floor(10 sqrt(-log p)). No step is
worth more than 1, so a child is never worth more than its parent.

Shapes: G groups of rows, K bins; B rows, W beam nodes, C children offered by each, M candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.runtime import to_device

BINS = 28
"""K, the number of bins; the last one holds probabilities below exp(-7.3)."""
_FINENESS = 10.0
_TIE_BREAK = 1e-4
_MIN_VALUE = 1e-9
"""Replaces rates of 0, whose logarithm is not finite."""

Array = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]


def bins(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """The bin number of each log-probability in `scores`."""
    root = np.sqrt(np.maximum(-scores, 0.0)) * _FINENESS
    found: npt.NDArray[np.int64] = np.minimum(root, BINS - 1).astype(np.int64)
    return found


BIN_EDGES: Array = -((np.arange(BINS + 1, dtype=np.float64) / _FINENESS) ** 2)
"""[K + 1] log-probabilities that separate the bins; the last bin is open below."""
BIN_CENTERS: Array = -(((np.arange(BINS, dtype=np.float64) + 0.5) / _FINENESS) ** 2)
"""[K] a log-probability in the middle of each bin."""


class ValueTable:
    """Rates at which steps are accepted, by group, by first or later child, and by the bin of their probability."""

    def __init__(self, values: Array) -> None:  # [G, 2, K]: first children, then all others
        # non-increasing over bins and from first to later children, so that the best child stays the best
        self.values: Array = np.minimum.accumulate(
            np.minimum.accumulate(np.clip(values, _MIN_VALUE, 1.0), axis=1), axis=2
        )
        self.logs: Floats = np.log(self.values).astype(np.float32)
        """[G, 2, K] their logarithms."""
        self._on: dict[torch.device, Tensor] = {}

    def look_up(self, steps: Tensor, groups: Tensor) -> Tensor:
        """[B, W, C] logarithms of the values of steps to children.

        `steps` [B, W, C] are the children's log-probabilities, best first; `groups` [B] int64. Ties are broken by the
        log-probability itself.
        """
        later = torch.arange(steps.shape[2], device=steps.device) > 0
        return self.of_nodes(steps, later, groups.view(-1, 1, 1))

    def on_host(self, steps: Floats, later: npt.NDArray[np.bool_], groups: npt.NDArray[np.int64]) -> Floats:
        """`of_nodes` without PyTorch; `steps` are at most 0, and the other arguments broadcast to them."""
        index = np.minimum(np.sqrt(-steps) * np.float32(_FINENESS), np.float32(BINS - 1)).astype(np.int64)
        index += BINS * later + 2 * BINS * groups
        worth: Floats = self.logs.ravel()[index] + np.float32(_TIE_BREAK) * steps
        return worth

    def of_step(self, step: float, later: bool, group: int) -> float:
        """`of_nodes` of a single step, without arrays; `step` is at most 0."""
        root = math.sqrt(-step) * _FINENESS
        index = int(root) if root < BINS - 1 else BINS - 1  # also if it is infinite
        return self._listed[2 * group + later][index] + _TIE_BREAK * step

    @cached_property
    def _listed(self) -> list[list[float]]:
        listed: list[list[float]] = self.logs.reshape(-1, BINS).tolist()
        return listed

    def of_nodes(self, steps: Tensor, later: Tensor, groups: Tensor) -> Tensor:
        """Logarithms of the values of steps to nodes, given their log-probabilities `steps`, in any shape.

        `later`: which of them aren't their parent's first child; `groups`: the group of each.
        """
        flat = self._on.get(steps.device)
        if flat is None:
            flat = to_device(self.logs.ravel(), steps.device, torch.float32)
            self._on[steps.device] = flat
        index = steps.neg().clamp_(min=0.0).sqrt_().mul_(_FINENESS).clamp_(max=BINS - 1).to(torch.int64)
        index.add_(later, alpha=BINS).add_(groups, alpha=2 * BINS)
        return torch.add(flat[index], steps, alpha=_TIE_BREAK)


class NodeChoice(NamedTuple):
    """Which candidates to verify: the `nodes` best among the `per_row` best of each row."""

    per_row: int
    nodes: int

    def mask(self, values: Array) -> npt.NDArray[np.bool_]:
        """[B, M] bool: the candidates chosen by their `values` [B, M]; among equals the earlier ones."""
        order = np.argsort(-values, axis=1, kind="stable")[:, : self.per_row]
        rows = np.arange(len(values))[:, None]
        best = np.argsort(-values[rows, order], axis=None, kind="stable")[: self.nodes]
        row, rank = np.divmod(best, max(1, order.shape[1]))
        chosen = np.zeros(values.shape, dtype=bool)
        chosen[row, order[row, rank]] = True
        return chosen


def most_profitable(
    values: Array,
    prices: Sequence[float] | Array,
    padding_prices: Sequence[float] | None,
    limit: int | None = None,
    alone: float | None = None,
) -> NodeChoice:
    """Choose the candidates whose total value exceeds its price by the most; no nodes if none does.

    `values` [B, M] of the candidates, 0 = excluded; a row gets at most `limit` of them. `prices` are what 1, 2, ...
    nodes must gain in total; their number is the most nodes allowed. `padding_prices` are the same for padding nodes,
    with the last one for any higher number; None = padding is free. `alone` is the price of the round without nodes.

    Prices say what the time is worth at some rate of tokens per second. Where a round makes more than that, as in a
    passage that is copied, the next rounds are likely to do so too, and its time is worth its own rate: with `alone`,
    the choice is the one with the most tokens per price, if that is more than one. (Dinkelbach, "On nonlinear
    fractional programming", 1967: it is also the most profitable choice at that rate.)

    Attention pads all rows of a pass to the longest, so all pay for one easy row's long tree. The same number of nodes
    spread evenly needs no padding and gains a little less. Both, and limits in between, are tried: for each limit on
    a row's nodes, the best candidates of all rows in order of value, as many as pay off.
    """
    rows = len(values)
    most = min(limit or values.shape[1], int((values > 0.0).sum(1).max()))
    ranked = -np.sort(-values, axis=1)
    node_prices = np.asarray(prices)
    padding = np.concatenate(([0.0], padding_prices or (0.0,)))
    best = 0.0
    choice = NodeChoice(most, 0)
    fastest = 1.0 if alone is None else max(1.0, rows / alone)
    fast_choice = choice
    # if padding is free, a limit can only lose value
    for per_row in (most,) if padding_prices is None else _limits(most):
        offered = np.sort(ranked[:, :per_row], axis=None)[::-1]
        offered = offered[offered > 0.0][: len(node_prices)]
        padded = rows * per_row - np.arange(1, len(offered) + 1)
        total = offered.cumsum()
        price = node_prices[: len(offered)] + padding[np.minimum(padded, len(padding) - 1)]
        profit = total - price
        if len(profit) and profit.max() > best:
            best = float(profit.max())
            choice = NodeChoice(per_row, int(profit.argmax()) + 1)
        if alone is not None and len(profit):
            speed = (rows + total) / (alone + price)
            if speed.max() > fastest:
                fastest = float(speed.max())
                fast_choice = NodeChoice(per_row, int(speed.argmax()) + 1)
    return fast_choice if fastest > 1.0 else choice


def _limits(most: int) -> list[int]:
    """Limits up to `most`: all up to 8, then four in an octave, because trying 64 takes 2 ms."""
    return [limit for limit in range(1, most) if limit & ((1 << max(0, limit.bit_length() - 3)) - 1) == 0] + [most]


def most_profitable_of_a_row(
    values: Sequence[float], prices: Sequence[float], limit: int | None = None, alone: float | None = None
) -> list[int]:
    """`most_profitable` for a single row [M], which has no padding: its nodes, the most valuable first.

    It works on lists, because a few candidates take less time than one array operation.
    """
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)[: limit or len(values)]
    total = best = 0.0
    fastest = 1.0 if alone is None else max(1.0, 1.0 / alone)
    nodes = fast_nodes = 0
    for count, (node, price) in enumerate(zip(order, prices, strict=False), 1):
        if values[node] <= 0.0:
            break
        total += values[node]
        if total - price > best:
            best = total - price
            nodes = count
        if alone is not None and 1.0 + total > fastest * (alone + price):
            fastest = (1.0 + total) / (alone + price)
            fast_nodes = count
    return order[: fast_nodes if fastest > 1.0 else nodes]


def may_pay(values: Array, best: float, levels: int, depth: int, prices: Array, level_price: float) -> bool:
    """Whether a row's levels after the first `levels`, up to `depth`, may gain more than they cost.

    `values` [M] of its candidates so far, `best` that of the last level's best path. Each further level is taken to
    have one more candidate worth verifying, and to multiply that path's value as the levels so far did on average. So a
    draft goes on for several levels at once where passes get dearer by steps. `prices` [N] are what 1, 2, ... nodes
    must gain in total, `level_price` what each further level must.
    """

    def profit() -> float:
        taken = ranked[: len(prices)]
        return max(0.0, float((taken.cumsum() - prices[: len(taken)]).max(initial=0.0)))

    ranked = np.sort(values)[::-1]
    now = profit()
    step = best ** (1.0 / levels)
    for further in range(1, depth - levels + 1):
        best *= step
        ranked = np.insert(ranked, np.searchsorted(-ranked, -best, side="right"), best)
        if profit() - further * level_price > now:
            return True
    return False


def top_k_mask(scores: Tensor, count: int) -> Tensor:
    """[B, M] bool: the `count` greatest of each row of `scores` [B, M]; among equals the earlier ones."""
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.topk(count, dim=1).values[:, -1:]
    above, level = scores > least, scores == least
    return above | (level & (level.cumsum(1) <= count - above.sum(1, keepdim=True)))
