"""Pairs that a drafter was told of and hasn't read yet: nobody wanted a draft, so only copies were made.

Shapes: R rows (a contiguous range of slots), Q positions, A taps, Ht target hidden, C capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.target import mapped

_GRANULE = 64


class PendingPairs:
    """For each slot, in order: the tokens [slots, C] and the taps [slots, C, A, Ht] of its unread pairs.

    Takes memory from the first pair on, and no more than a little once all have been read.
    """

    def __init__(self, slots: int) -> None:
        self.lengths = [0] * slots
        self._tokens: Tensor | None = None
        self._taps: Tensor | None = None

    def reshape(self, slots: int) -> None:
        """Have `slots` slots, keeping what is in those that stay."""
        self.lengths = self.lengths[:slots] + [0] * max(0, slots - len(self.lengths))
        if self._tokens is not None and self._taps is not None:
            self._resize(slots, self._tokens.shape[1], self._tokens, self._taps)

    def append(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Keep the first `counts[r]` of next_tokens [R, Q] and taps [R, Q, A, Ht]."""
        slots: list[int] = []
        columns: list[int] = []
        places: list[int] = []
        for row, (slot, count) in enumerate(zip(rows, counts, strict=True)):
            length, first = self.lengths[slot], row * next_tokens.shape[1]
            slots += [slot] * count
            columns += range(length, length + count)
            places += range(first, first + count)
            self.lengths[slot] = length + count
        if not slots:
            return
        kept_tokens, kept_taps = self._room(next_tokens, taps)
        at = torch.tensor([slots, columns, places], device=taps.device)
        kept_tokens[at[0], at[1]] = next_tokens.flatten().index_select(0, at[2])
        kept_taps[at[0], at[1]] = taps.flatten(0, 1).index_select(0, at[2])

    def part(self, rows: range, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Tokens [R, Q] and taps [R, Q, A, Ht] of the columns [begin, end); past a row's length they mean nothing."""
        if self._tokens is None or self._taps is None:
            raise IndexError("no pair was ever kept")
        here = slice(rows.start, rows.stop)
        return self._tokens[here, begin:end], self._taps[here, begin:end]

    def copy_out(self, slot: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of a slot's pairs [begin, end): tokens [1, n], taps [1, n, A, Ht]."""
        tokens, taps = self.part(range(slot, slot + 1), begin, end)
        return tokens.clone(), mapped.copy(taps)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` of a slot's pairs."""
        self.lengths[slot] = min(self.lengths[slot], length)
        if self._tokens is not None and self._tokens.shape[1] > _GRANULE and not any(self.lengths):
            self._tokens = self._taps = None

    def move(self, source: int, target: int) -> None:
        """Copy a slot's pairs over another's and empty it."""
        used = self.lengths[source]
        if used:
            tokens, taps = self.part(range(len(self.lengths)), 0, used)
            tokens[target], taps[target] = tokens[source], taps[source]
        self.lengths[target], self.lengths[source] = used, 0

    def _room(self, next_tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        """Both buffers, wide enough for the longest slot. They double, so copying is paid for once a doubling."""
        wanted, held = max(self.lengths), 0 if self._tokens is None else self._tokens.shape[1]
        if self._tokens is not None and self._taps is not None and wanted <= held:
            return self._tokens, self._taps
        capacity = max(wanted + -wanted % _GRANULE, 2 * held)
        if self._tokens is not None and self._taps is not None:
            return self._resize(len(self.lengths), capacity, self._tokens, self._taps)
        return self._resize(len(self.lengths), capacity, next_tokens[:0], taps[:0])

    def _resize(self, slots: int, columns: int, tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        """Make both buffers `slots` x `columns`, with what fits in of tokens [S, C] and taps [S, C, A, Ht]."""
        self._tokens, self._taps = (_resized(old, slots, columns) for old in (tokens, taps))
        return self._tokens, self._taps


def _resized(old: Tensor, slots: int, columns: int) -> Tensor:
    """[S, C, ...] -> [slots, columns, ...], zeros where there was nothing."""
    new = mapped.zeros((slots, columns, *old.shape[2:]), old.dtype, old.device)
    kept, held = min(slots, old.shape[0]), min(columns, old.shape[1])
    new[:kept, :held] = old[:kept, :held]
    return new
