"""Filters of a distribution, with the numbers of `transformers`' logits warpers but one parameter per row.

Each is an exact identity for a row that has it off, so a row's result doesn't depend on its neighbours.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOP_P_OFF = -1.0
"""A `cut` that no cumulative probability is at or below."""


def keep_top_k(logits: Tensor, k: Tensor, largest: int) -> Tensor:
    """The `k` [B] best of each row (0 = all); ties with the k-th stay. `largest` = the greatest k."""
    best = logits.topk(largest, dim=-1).values  # [B, largest]
    kth = best.gather(1, (k - 1).clamp(min=0).unsqueeze(1)).masked_fill_((k == 0).unsqueeze(1), -math.inf)
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, cut: Tensor) -> Tensor:
    """The smallest set of best tokens with probability top_p, given `cut` [B] = 1 - top_p, or TOP_P_OFF."""
    ascending, order = logits.sort(dim=-1, stable=True)
    # summed in float64, rounded to float32: no device's way of splitting the sum shows
    cumulative = ascending.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64).to(torch.float32)
    drop = cumulative <= cut.unsqueeze(1)
    drop[:, -1] = False
    return logits.masked_fill(torch.empty_like(drop).scatter_(1, order, drop), -math.inf)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Tokens at least `min_p` [B] times as probable as the best one (0 = all)."""
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < min_p.unsqueeze(1) * probs.amax(dim=-1, keepdim=True), -math.inf)
