"""Pairs that a drafter was told of and hasn't read yet: nobody wanted a draft, so only copies were made.

Shapes: R rows (a contiguous range of slots), Q positions, A taps, Ht target hidden, C capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_GRANULE = 64


class PendingPairs:
    """For each slot, in order: the tokens [slots, C] and the taps [slots, C, A, Ht] of its unread pairs.

    Takes memory from the first pair on.
    """

    def __init__(self, slots: int) -> None:
        self.lengths = [0] * slots
        self._tokens: Tensor | None = None
        self._taps: Tensor | None = None

    def reshape(self, slots: int) -> None:
        """Have `slots` slots, keeping what is in those that stay."""
        more = max(0, slots - len(self.lengths))
        self.lengths = self.lengths[:slots] + [0] * more
        if self._tokens is not None and self._taps is not None:
            self._tokens = F.pad(self._tokens[:slots], (0, 0, 0, more))
            self._taps = F.pad(self._taps[:slots], (0, 0, 0, 0, 0, 0, 0, more))

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
        return tokens.clone(), taps.clone()

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` of a slot's pairs."""
        self.lengths[slot] = min(self.lengths[slot], length)

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
        tokens = next_tokens.new_empty(len(self.lengths), capacity)
        states = taps.new_empty(len(self.lengths), capacity, *taps.shape[2:])
        if self._tokens is not None and self._taps is not None:
            tokens[:, :held], states[:, :held] = self._tokens, self._taps
        self._tokens, self._taps = tokens, states
        return tokens, states
