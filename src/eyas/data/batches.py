"""Chats of like length side by side, so that little is padding.

Batch n is a pure function of n and the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.data.tokenize import TokenRow
from eyas.errors import DataError


class TokenBatch(NamedTuple):
    """B rows padded to the longest, S."""

    tokens: Tensor  # [B, S] int64, padding is 0
    loss_mask: Tensor  # [B, S] bool, false at padding
    lengths: Tensor  # [B]


class ChatBatches:
    """Rows cut to `longest` tokens and grouped so that rows x longest row of a batch stays within `budget`.

    A row whose answer was cut off whole is left out. Each epoch goes through the same batches in a new order.
    """

    def __init__(self, rows: Sequence[TokenRow], budget: int, longest: int, seed: int) -> None:
        cut = [TokenRow(row.tokens[:longest], row.loss_mask[:longest]) for row in rows]
        self._rows = [row for row in cut if row.loss_mask[2:].any()]
        if not self._rows:
            raise DataError(f"no chat has an answer token within its first {longest} tokens")
        order = np.random.default_rng(seed).permutation(len(self._rows))  # like lengths don't stay in file order
        by_length = sorted(order.tolist(), key=lambda i: len(self._rows[i].tokens))
        self._groups = list(_grouped(by_length, [len(row.tokens) for row in self._rows], budget))
        self._seed = seed

    @property
    def per_epoch(self) -> int:
        """Batches an epoch."""
        return len(self._groups)

    def batch(self, number: int) -> TokenBatch:
        """Batch `number`, counted over all epochs."""
        epoch, index = divmod(number, len(self._groups))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups))
        return padded([self._rows[i] for i in self._groups[order[index]]])


def padded(rows: Sequence[TokenRow]) -> TokenBatch:
    """Right-pad rows to the longest."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.from_numpy(row.tokens)
        mask[i, : len(row.tokens)] = torch.from_numpy(row.loss_mask)
    return TokenBatch(tokens, mask, lengths)


def _grouped(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Runs of rows, shortest first, as long as count x longest fits; a row over the budget goes alone."""
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * lengths[i] > budget:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
