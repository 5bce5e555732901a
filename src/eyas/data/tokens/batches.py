"""Batches of chats grouped by length, so that there is little padding. Batch n is a pure function of n and the seed.

Long chats may be cut into segments, each a row of its own. A segment begins with a few tokens of the previous one,
which don't count in the loss; the target computes its states with everything before it in the chat as context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from eyas.config import StrictModel
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import DataError


class TokenBatch(NamedTuple):
    """B rows, right-padded to the length S of the longest."""

    tokens: Tensor  # [B, S] int64, padding is 0
    loss_mask: Tensor  # [B, S] bool, false at padding
    lengths: Tensor  # [B]
    starts: Tensor  # [B] position of each row's first token in its chat


class SegmentConfig(StrictModel):
    """How long chats are cut into segments."""

    length: int = Field(gt=2)  # tokens of a segment that count; chats of at most this length stay whole
    context: int = Field(default=128, ge=2)  # tokens before a segment that are read with it but don't count


class Segment(NamedTuple):
    """A row of a batch: the tokens [start, stop) of a chat; those from `counted` on count in the loss."""

    chat: int
    start: int
    stop: int
    counted: int


class ChatBatches:
    """Chats cut to `longest` tokens and grouped into batches of at most `budget` tokens, padding included.

    With `segments` longer chats are cut into several rows. Rows without an answer token to learn from are left out.
    Every epoch has the same batches in a new order.
    """

    def __init__(
        self, rows: Sequence[TokenRow], budget: int, longest: int, seed: int, segments: SegmentConfig | None = None
    ) -> None:
        self.rows = list(rows)
        self.longest = longest
        self.segments = [
            part for chat, row in enumerate(rows) for part in _cut(chat, len(row.tokens), longest, segments)
        ]
        """All segments; the members of a batch are indices into this list."""
        kept = [i for i in range(len(self.segments)) if learnable(self._row(i))]
        if not kept:
            raise DataError(f"no chat has an answer token within its first {longest} tokens")
        order = np.random.default_rng(seed).permutation(len(kept))  # rows of one length are shuffled
        lengths = [part.stop - part.start for part in self.segments]
        by_length = sorted((kept[i] for i in order.tolist()), key=lambda i: lengths[i])
        self.used = sorted({self.segments[i].chat for i in kept})
        """Indices of the chats that batches are made of."""
        self._groups = list(grouped(by_length, lengths, budget))
        self._seed = seed

    @property
    def per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return len(self._groups)

    def members(self, number: int) -> list[int]:
        """The indices of the segments in batch `number`, counted over all epochs, in the batch's order."""
        epoch, index = divmod(number, len(self._groups))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups))
        return list(self._groups[order[index]])

    def batch(self, number: int) -> TokenBatch:
        """The padded rows of batch `number`, counted over all epochs."""
        return self.of(self.members(number))

    def of(self, members: Sequence[int]) -> TokenBatch:
        """A batch of the segments with these indices, padded."""
        return padded([self._row(i) for i in members], [self.segments[i].start for i in members])

    def prefix(self, member: int) -> TokenBatch:
        """A batch of one row: a segment with everything before it in its chat, which doesn't count in the loss."""
        return padded([self._row(member, whole=True)])

    def _row(self, member: int, whole: bool = False) -> TokenRow:
        chat, start, stop, counted = self.segments[member]
        row = self.rows[chat]
        start = 0 if whole else start
        counts = np.arange(start, min(stop, len(row.tokens))) >= counted
        return TokenRow(row.tokens[start:stop], row.loss_mask[start:stop] & counts, row.id)


def _cut(chat: int, length: int, longest: int, segments: SegmentConfig | None) -> Iterator[Segment]:
    """The segments of a chat of `length` tokens; one if it isn't cut."""
    stop = min(length, longest)
    if segments is None or stop <= segments.length:
        yield Segment(chat, 0, stop, 0)
        return
    for first in range(0, stop, segments.length):
        yield Segment(chat, max(0, first - segments.context), min(first + segments.length, stop), first)


def cut_row(row: TokenRow, longest: int) -> TokenRow:
    """The row cut to its first `longest` tokens."""
    return TokenRow(row.tokens[:longest], row.loss_mask[:longest], row.id)


def learnable(row: TokenRow) -> bool:
    """Whether any answer token has two tokens before it, the fewest that a drafter can guess from."""
    return bool(row.loss_mask[2:].any())


def padded(rows: Sequence[TokenRow], starts: Sequence[int] | None = None) -> TokenBatch:
    """Right-pad rows to the length of the longest; `starts`: where they begin in their chats, if not at 0."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.from_numpy(row.tokens)
        mask[i, : len(row.tokens)] = torch.from_numpy(row.loss_mask)
    return TokenBatch(tokens, mask, lengths, torch.tensor(starts or [0] * len(rows)))


def grouped(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Split `order`, sorted by length, into runs of at most `budget` tokens with padding; a longer row is alone."""
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * lengths[i] > budget:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
