"""The pairs that a drafter has yet to read: copied, in the order in which they came.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden, C capacity of the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from eyas.runtime import mapped_copy, mapped_zeros, to_device

_GRANULE = 64
"""Columns of the smallest buffers of deferred pairs; larger ones hold a multiple of it."""
_HELD = 16
"""Appends that are held until they are copied, and pairs that one may have to be held: copying the few of each plain
round at once would take several percent of a small target's pass."""


class DeferredPairs:
    """The deferred pairs of every slot, in order: their tokens [slots, C] and taps [slots, C, A, Ht].

    Nothing is allocated before the first pair, and little is kept when all have been read.
    """

    def __init__(self, slots: int) -> None:
        self.lengths = [0] * slots
        self._tokens: Tensor | None = None
        self._taps: Tensor | None = None
        self._held: list[tuple[Tensor, Tensor, list[tuple[int, int, int]]]] = []
        """Appended, not copied yet: tokens [n], taps [n, A, Ht], and each pair's slot, column and index into them."""

    def reshape(self, slots: int) -> None:
        """Change to `slots` slots; those that stay keep their pairs."""
        self._copy()
        self.lengths = self.lengths[:slots] + [0] * max(0, slots - len(self.lengths))
        if self._tokens is not None and self._taps is not None:
            self._resize(slots, self._tokens.shape[1], self._tokens, self._taps)

    def append(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Add the first `counts[r]` of next_tokens [R, Q] and taps [R, Q, A, Ht] to each row's slot.

        The tensors may be held for some appends more, and must not change.
        """
        positions = []
        for row, (slot, count) in enumerate(zip(rows, counts, strict=True)):
            length = self.lengths[slot]
            positions += [(slot, length + i, row * next_tokens.shape[1] + i) for i in range(count)]
            self.lengths[slot] = length + count
        if positions:
            self._held.append((next_tokens.flatten(), taps.flatten(0, 1), positions))
        if len(self._held) >= _HELD or len(positions) > _HELD:
            self._copy()

    def _copy(self) -> None:
        """Copy what is held into the buffers."""
        if not self._held:
            return
        all_tokens, all_taps, all_positions = zip(*self._held, strict=True)
        self._held = []
        starts = accumulate((len(tokens) for tokens in all_tokens), initial=0)
        table = [
            (s, c, start + i) for start, positions in zip(starts, all_positions, strict=False) for s, c, i in positions
        ]
        tokens, taps = torch.cat(all_tokens), torch.cat(all_taps)
        kept_tokens, kept_taps = self._room(tokens, taps)
        slot, column, source = to_device(table, taps.device).unbind(1)
        kept_tokens[slot, column] = tokens.index_select(0, source)
        kept_taps[slot, column] = taps.index_select(0, source)

    def part(self, rows: range, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Views of the tokens [R, Q] and taps [R, Q, A, Ht] in columns [begin, end); rubbish past a row's length."""
        self._copy()
        if self._tokens is None or self._taps is None:
            raise IndexError("no pair was deferred yet")
        slots = slice(rows.start, rows.stop)
        return self._tokens[slots, begin:end], self._taps[slots, begin:end]

    def copy_out(self, slot: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of a slot's pairs [begin, end): tokens [1, n], taps [1, n, A, Ht]."""
        tokens, taps = self.part(range(slot, slot + 1), begin, end)
        return tokens.clone(), mapped_copy(taps)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` of a slot's pairs."""
        if length < self.lengths[slot]:
            self._copy()
            self.lengths[slot] = length
        if self._tokens is not None and self._tokens.shape[1] > _GRANULE and not any(self.lengths):
            self._tokens = self._taps = None

    def drop(self, slot: int, count: int) -> None:
        """Forget the first `count` of a slot's pairs."""
        length = self.lengths[slot]
        for kept in self.part(range(slot, slot + 1), 0, length):
            kept[:, : length - count] = kept[:, count:].clone()
        self.lengths[slot] = length - count

    def move(self, source: int, target: int) -> None:
        """Copy a slot's pairs over another's and empty it."""
        used = self.lengths[source]
        if used:
            tokens, taps = self.part(range(len(self.lengths)), 0, used)
            tokens[target], taps[target] = tokens[source], taps[source]
        self.lengths[target], self.lengths[source] = used, 0

    def _room(self, next_tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        """Both buffers, wide enough for the longest slot; tokens [n] and taps [n, A, Ht] say of which type.

        They double in size, so few appends copy them.
        """
        wanted, held = max(self.lengths), 0 if self._tokens is None else self._tokens.shape[1]
        if self._tokens is not None and self._taps is not None and wanted <= held:
            return self._tokens, self._taps
        capacity = max(wanted + -wanted % _GRANULE, 2 * held)
        if self._tokens is not None and self._taps is not None:
            return self._resize(len(self.lengths), capacity, self._tokens, self._taps)
        return self._resize(len(self.lengths), capacity, next_tokens[:0].unsqueeze(0), taps[:0].unsqueeze(0))

    def _resize(self, slots: int, columns: int, tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        """Replace both buffers by ones of `slots` x `columns` and copy what fits of tokens and taps into them."""
        self._tokens, self._taps = (_resized(old, slots, columns) for old in (tokens, taps))
        return self._tokens, self._taps


def _resized(old: Tensor, slots: int, columns: int) -> Tensor:
    """A copy [slots, columns, ...] of a buffer [S, C, ...], cut or filled up with zeros."""
    new = mapped_zeros((slots, columns, *old.shape[2:]), old.dtype, old.device)
    kept, held = min(slots, old.shape[0]), min(columns, old.shape[1])
    new[:kept, :held] = old[:kept, :held]
    return new
