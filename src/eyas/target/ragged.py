"""Rows of different lengths laid end to end, so that linears, norms and the head run on real tokens alone.

Only attention knows rows: there queries, keys and values are spread out to the padded form, and what it puts out is
collected again.

Shapes: R rows, Q columns of the padded form, T real tokens, row after row, each row's in the order of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Where the tokens of a pass lie."""

    index: Tensor  # [R, Q] int64: the token at each place; a place without one shows the token before it
    places: Tensor  # [T] int64: the place row * Q + column of each token

    @staticmethod
    def of(present: Tensor, total: int) -> Ragged:
        """From `present` [R, Q] bool, of which `total` places are true; asks the device for nothing."""
        seen = present.flatten().cumsum(0)  # [R * Q] tokens up to and including each place
        ranks = torch.arange(1, total + 1, device=seen.device)
        return Ragged((seen - 1).clamp(min=0).view(present.shape), torch.searchsorted(seen, ranks))

    @staticmethod
    def of_counts(counts: Sequence[int], device: torch.device) -> Ragged:
        """Rows of `counts` tokens each; their padded form is as wide as the longest."""
        steps = torch.arange(max(counts), device=device)
        return Ragged.of(steps < torch.tensor(list(counts), device=device).unsqueeze(1), sum(counts))

    def pack(self, padded: Tensor) -> Tensor:
        """[R, Q, ...] -> [1, T, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, T, ...] -> [R, Q, ...]; places without a token show another one's."""
        return torch.unflatten(packed[0].index_select(0, self.index.flatten()), 0, self.index.shape)

    def spread(self, heads: Tensor) -> Tensor:
        """Queries, keys or values [1, H, T, D] -> [R, H, Q, D]."""
        return torch.unflatten(heads[0].index_select(1, self.index.flatten()), 1, self.index.shape).transpose(0, 1)
