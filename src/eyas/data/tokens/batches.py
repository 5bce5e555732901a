"""Batches of chats grouped by length, so that little is padding. Batch n is a pure function of n and the seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import DataError


class TokenBatch(NamedTuple):
    """B rows, right-padded to the length S of the longest."""

    tokens: Tensor  # [B, S] int64, padding is 0
    loss_mask: Tensor  # [B, S] bool, false at padding
    lengths: Tensor  # [B]


class ChatBatches:
    """Rows cut to `longest` tokens and grouped into batches of at most `budget` tokens, padding included.

    Rows without an answer token within `longest` tokens are left out. Every epoch has the same batches in a new order.
    """

    def __init__(self, rows: Sequence[TokenRow], budget: int, longest: int, seed: int) -> None:
        cut = [cut_row(row, longest) for row in rows]
        kept = [i for i, row in enumerate(cut) if learnable(row)]
        if not kept:
            raise DataError(f"no chat has an answer token within its first {longest} tokens")
        order = np.random.default_rng(seed).permutation(len(kept))  # rows of one length are shuffled
        lengths = [len(row.tokens) for row in cut]
        by_length = sorted((kept[i] for i in order.tolist()), key=lambda i: lengths[i])
        self.rows, self.longest = list(rows), longest
        self.used = sorted(kept)
        """Indices of the rows that batches are made of."""
        self._groups = list(grouped(by_length, lengths, budget))
        self._seed = seed

    @property
    def per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return len(self._groups)

    def members(self, number: int) -> list[int]:
        """The indices of the rows in batch `number`, counted over all epochs, in the batch's order."""
        epoch, index = divmod(number, len(self._groups))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups))
        return list(self._groups[order[index]])

    def batch(self, number: int) -> TokenBatch:
        """The padded rows of batch `number`, counted over all epochs."""
        return self.of(self.members(number))

    def of(self, members: Sequence[int]) -> TokenBatch:
        """A batch of the rows with these indices, cut and padded."""
        return padded([cut_row(self.rows[i], self.longest) for i in members])


def cut_row(row: TokenRow, longest: int) -> TokenRow:
    """The row cut to its first `longest` tokens."""
    return TokenRow(row.tokens[:longest], row.loss_mask[:longest], row.id)


def learnable(row: TokenRow) -> bool:
    """Whether any answer token has two tokens before it, the fewest that a drafter can guess from."""
    return bool(row.loss_mask[2:].any())


def padded(rows: Sequence[TokenRow]) -> TokenBatch:
    """Right-pad rows to the length of the longest."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.from_numpy(row.tokens)
        mask[i, : len(row.tokens)] = torch.from_numpy(row.loss_mask)
    return TokenBatch(tokens, mask, lengths)


def grouped(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Split `order`, sorted by length, into runs of at most `budget` tokens with padding; a longer row goes alone."""
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * lengths[i] > budget:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
