"""Pairs that a drafter hasn't read yet: most pairs of plain rounds never are.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.runtime import mapped_copy, to_device

_HELD = 16
"""How many appends are held before their pairs are sorted by slot, and the most pairs of an append that is held."""


class _Piece(NamedTuple):
    """Consecutive pairs of a slot: tokens, and the target states that each of them follows."""

    tokens: Tensor  # [n]
    taps: Tensor  # [n, A, Ht]

    def part(self, begin: int, end: int) -> _Piece:
        return _Piece(self.tokens[begin:end], self.taps[begin:end])


class DeferredPairs:
    """The unread pairs of every slot, in order of arrival.

    Only the few pairs of plain rounds are copied, several rounds at a time. Many pairs are never read, and copying each
    on arrival would take several percent of a small target's pass.
    """

    def __init__(self, slots: int) -> None:
        self.lengths = [0] * slots
        self._pieces: list[list[_Piece]] = [[] for _ in range(slots)]
        self._held: list[tuple[Tensor, Tensor, list[tuple[int, int]]]] = []
        """Appends not sorted yet: tokens [R, Q], taps [R, Q, A, Ht], and each pair's slot and index into R * Q."""

    def reshape(self, slots: int) -> None:
        """Resize to `slots` slots; remaining slots keep their pairs."""
        self._sort()
        added = max(0, slots - len(self.lengths))
        self.lengths = self.lengths[:slots] + [0] * added
        self._pieces = self._pieces[:slots] + [[] for _ in range(added)]

    def append(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Add the first `counts[r]` of next_tokens [R, Q] and taps [R, Q, A, Ht] to each row's slot.

        The tensors are kept as long as any of their pairs, and must not change.
        """
        given = [(row, slot, count) for row, (slot, count) in enumerate(zip(rows, counts, strict=True)) if count]
        for _, slot, count in given:
            self.lengths[slot] += count
        if sum(counts) > _HELD:
            self._sort()
            for row, slot, count in given:
                self._pieces[slot].append(_Piece(next_tokens[row, :count], taps[row, :count]))
        elif given:
            width = next_tokens.shape[1]
            pairs = [(slot, row * width + i) for row, slot, count in given for i in range(count)]
            self._held.append((next_tokens, taps, pairs))
            if len(self._held) >= _HELD:
                self._sort()

    def _sort(self) -> None:
        """Move the held pairs to their slots."""
        if not self._held:
            return
        held, self._held = self._held, []
        all_tokens, all_taps = [tokens.flatten() for tokens, _, _ in held], [taps.flatten(0, 1) for _, taps, _ in held]
        found: dict[int, list[int]] = defaultdict(list)
        for start, (_, _, pairs) in zip(accumulate(map(len, all_tokens), initial=0), held, strict=False):
            for slot, index in pairs:
                found[slot].append(start + index)
        order = to_device([index for indices in found.values() for index in indices], all_tokens[0].device)
        tokens, taps = (torch.cat(parts).index_select(0, order) for parts in (all_tokens, all_taps))
        sorted_pairs, start = _Piece(tokens, taps), 0
        for slot, indices in found.items():
            self._pieces[slot].append(sorted_pairs.part(start, start + len(indices)))
            start += len(indices)

    def _parts(self, slot: int, begin: int, end: int) -> Iterator[_Piece]:
        """A slot's pairs `[begin, end)`, in pieces."""
        self._sort()
        for piece in self._pieces[slot]:
            count = len(piece.tokens)
            if begin < count and end > 0:
                yield piece.part(max(begin, 0), end)
            begin, end = begin - count, end - count

    def part(self, rows: range, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The tokens [R, Q] and taps [R, Q, A, Ht] of pairs `[begin, end)` of each row; zeros past a row's length."""
        self._sort()
        found = [list(self._parts(slot, begin, end)) for slot in rows]
        some = next((pieces[0] for pieces in found if pieces), None)
        if some is None:
            raise IndexError(f"no slot of {rows} has pairs from {begin} on")
        tokens = some.tokens.new_zeros(len(rows), end - begin)
        taps = some.taps.new_zeros(len(rows), end - begin, *some.taps.shape[1:])
        for row, pieces in enumerate(found):
            at = 0
            for piece in pieces:
                after = at + len(piece.tokens)
                tokens[row, at:after], taps[row, at:after] = piece
                at = after
        return tokens, taps

    def copy_out(self, slot: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of a slot's pairs `[begin, end)`: tokens [1, n], taps [1, n, A, Ht]."""
        tokens, taps = self.part(range(slot, slot + 1), begin, end)
        return tokens, mapped_copy(taps)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` of a slot's pairs."""
        if length < self.lengths[slot]:
            self._keep(slot, 0, length)

    def drop(self, slot: int, count: int) -> None:
        """Forget the first `count` of a slot's pairs."""
        self._keep(slot, count, self.lengths[slot])

    def _keep(self, slot: int, begin: int, end: int) -> None:
        self._pieces[slot] = list(self._parts(slot, begin, end))
        self.lengths[slot] = end - begin

    def move(self, source: int, target: int) -> None:
        """Move a slot's pairs to another slot, replacing its own."""
        self._sort()
        self._pieces[target], self._pieces[source] = self._pieces[source], []
        self.lengths[target], self.lengths[source] = self.lengths[source], 0
