"""Chats of like length side by side, so that little is padding.

Batch n is a pure function of n and the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.data.tokens.tokenize import TokenRow
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
        cut = [cut_row(row, longest) for row in rows]
        kept = [i for i, row in enumerate(cut) if learnable(row)]
        if not kept:
            raise DataError(f"no chat has an answer token within its first {longest} tokens")
        order = np.random.default_rng(seed).permutation(len(kept))  # like lengths don't stay in file order
        lengths = [len(row.tokens) for row in cut]
        by_length = sorted((kept[i] for i in order.tolist()), key=lambda i: lengths[i])
        self.rows, self.longest = list(rows), longest
        self.used = sorted(kept)
        """Rows that batches are made of: those with something to learn."""
        self._groups = list(grouped(by_length, lengths, budget))
        self._seed = seed

    @property
    def per_epoch(self) -> int:
        """Batches an epoch."""
        return len(self._groups)

    def members(self, number: int) -> list[int]:
        """Which of the rows (as they were given) make batch `number`, counted over all epochs; in its order."""
        epoch, index = divmod(number, len(self._groups))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups))
        return list(self._groups[order[index]])

    def batch(self, number: int) -> TokenBatch:
        """Batch `number`, counted over all epochs."""
        return self.of(self.members(number))

    def of(self, members: Sequence[int]) -> TokenBatch:
        """A batch of these rows."""
        return padded([cut_row(self.rows[i], self.longest) for i in members])


def cut_row(row: TokenRow, longest: int) -> TokenRow:
    """The first `longest` tokens of a row."""
    return TokenRow(row.tokens[:longest], row.loss_mask[:longest], row.id)


def learnable(row: TokenRow) -> bool:
    """Whether any answer token has two tokens before it, the least from which a drafter guesses."""
    return bool(row.loss_mask[2:].any())


def padded(rows: Sequence[TokenRow]) -> TokenBatch:
    """Right-pad rows to the longest."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.from_numpy(row.tokens)
        mask[i, : len(row.tokens)] = torch.from_numpy(row.loss_mask)
    return TokenBatch(tokens, mask, lengths)


def grouped(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Runs of rows, shortest first, as long as count x longest fits; a row over the budget goes alone."""
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * lengths[i] > budget:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
