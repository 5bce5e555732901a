"""What the round asks of a drafter.

Shapes: R rows (a contiguous range of slots), Q positions, A taps, Ht target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from eyas.tree import DraftTree, TreeSpec
from eyas.verify import Coupling


class SavedPairs(Protocol):
    """Pairs copied out of a slot."""

    @property
    def unread(self) -> int:
        """How many of them, from the end, were deferred and not read yet."""


class Drafter(Protocol):
    """Proposes trees of continuations; keeps what it knows of a sequence in that sequence's slot and nowhere else."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target boundaries it reads."""

    @property
    def slots(self) -> int:
        """Sequences it has room for."""

    def resize(self, slots: int) -> None:
        """Start over with `slots` empty slots."""

    def reshape(self, slots: int, columns: int) -> None:
        """Have `slots` slots of `columns` columns, keeping what lies in both."""

    def length(self, slot: int) -> int:
        """Pairs known of a slot, deferred ones included."""

    def unread(self, slot: int) -> int:
        """How many of them were deferred and not read yet."""

    def save(self, slot: int, start: int, stop: int) -> SavedPairs:
        """A copy of a slot's pairs `[start, stop)`."""

    def load(self, slot: int, saved: Any, count: int) -> None:
        """Append the first `count` of the pairs that `save` gave. Read ones can't follow unread ones."""

    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Learn what the target has committed (prefill included).

        taps [R, Q, A, Ht] are the states at some positions, next_tokens [R, Q] the tokens that follow them; only the
        first `counts[r]` of each row are real.
        """

    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Like `observe`, but nothing is computed before a draft is wanted of the row: if none ever is, only copies."""

    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        """Grow a tree below the last known token of each `drafting` row (None = of all); the others get no nodes."""

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything learnt from position `length` on."""

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another slot."""


def observe_rows(
    drafter: Drafter,
    rows: range,
    next_tokens: Tensor,
    taps: Tensor,
    counts: Sequence[int],
    observed: Sequence[bool],
    reading: Sequence[bool],
) -> None:
    """Give a drafter the first `counts[r]` pairs of each `observed` row [R]; rows not `reading` [R] defer theirs."""
    counts = [count * wanted for count, wanted in zip(counts, observed, strict=True)]
    now = [count * reads for count, reads in zip(counts, reading, strict=True)]
    drafter.observe(rows, next_tokens, taps, now)
    drafter.defer(rows, next_tokens, taps, [count - read for count, read in zip(counts, now, strict=True)])
