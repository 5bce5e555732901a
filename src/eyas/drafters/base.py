"""The protocol between the engine and a drafter: `SlotPairs`, its pairs of each sequence, and `Drafter`.

A pair is what a drafter learns from: the target's state at a position and the token that follows it.

Shapes: R rows (a contiguous range of slots), Q positions, A taps, Ht target hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from typing_extensions import Self

from eyas.tree import DraftTree, NodeLogits, TreeSpec
from eyas.verify import Coupling


class SavedPairs(Protocol):
    """Pairs that were copied out of a slot, to be loaded into another."""

    @property
    def unread(self) -> int:
        """How many of the last pairs were deferred and are still unread."""


class SlotPairs(Protocol):
    """The pairs of the sequence in each slot, in whatever form a drafter keeps them."""

    forgets: bool = False
    """Whether a slot keeps only its latest pairs, so that older ones must be saved before they are dropped."""

    @property
    def slots(self) -> int:
        """How many sequences there is room for."""

    def fresh(self) -> Self:
        """An empty store of the same form, without slots."""
        made = copy.copy(self)
        made.resize(0)
        return made

    def resize(self, slots: int) -> None:
        """Start over with `slots` empty slots that share nothing with the previous ones."""

    def reshape(self, slots: int, columns: int) -> None:
        """Resize to `slots` slots of `columns` columns; keep the contents that fit."""

    def begin(self, slot: int, prompt: Sequence[int], owner: str) -> None:  # noqa: ARG002
        """Start a sequence with this prompt in an empty slot; its pairs follow, beginning with the first.

        No pair contains the prompt's first token. What is learned from a sequence may only serve the same `owner`.
        """
        return

    def length(self, slot: int) -> int:
        """How many pairs a slot holds, deferred ones included."""

    def unread(self, slot: int) -> int:  # noqa: ARG002
        """How many of a slot's pairs were deferred and are still unread."""
        return 0

    def save(self, slot: int, start: int, stop: int) -> SavedPairs:
        """A copy of a slot's pairs `[start, stop)`."""

    def load(self, slot: int, saved: Any, count: int) -> None:
        """Append the first `count` of the pairs that `save` returned.

        Raises UsageError if pairs that were read would follow unread ones in the slot.
        """

    def kept_from(self, slot: int) -> int:  # noqa: ARG002
        """The lowest index from which on a slot still keeps all of its pairs."""
        return 0

    def whole(self, saved: Any) -> bool:  # noqa: ARG002
        """Whether what `save` returned is complete: none of its pairs had been dropped."""
        return True

    def reusable(self, saved: Sequence[Any], count: int) -> int:  # noqa: ARG002
        """How many of the first `count` saved pairs are worth loading; `saved` covers a row from its first pair.

        It is the largest number after which the drafter drafts as if it had read those pairs itself.
        """
        return count

    def truncate(self, slot: int, length: int) -> None:
        """Forget a slot's pairs from position `length` on."""

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another slot."""


class Drafter(Protocol):
    """Proposes trees of tokens that may continue a sequence, from its pairs."""

    pairs: SlotPairs
    """All that it knows about the sequences, by slot; no other object keeps any of it."""
    taps: tuple[int, ...]
    """The target's boundaries that it reads (aux hidden states)."""
    max_fanout: int
    """The most children that it can offer for a node, such as the size of its vocabulary."""
    max_depth: int | None = None
    """The deepest tree that it can draft; None = any."""
    default_tree: str | None = None
    """The tree spec that it drafts best with; None = unknown."""
    draws: bool = False
    """Whether its tokens come from distributions, as a network's do, rather than from a lookup."""
    computes: bool = True
    """Whether drafting takes computation, rather than a lookup at almost no cost."""
    looks_up: bool = False
    """Whether some of its tokens come from a lookup in known texts."""
    module: nn.Module | None = None
    """The network that it drafts with, if any."""
    priced: Drafter | None = None
    """The drafter whose costs stand for its own; None = itself."""

    def fresh(self) -> Self:
        """A drafter with the same weights and its own pairs, without slots yet."""
        made = copy.copy(self)
        made.pairs = self.pairs.fresh()
        return made

    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read pairs that the target has committed, in a round or in prefill.

        taps [R, Q, A, Ht] are the states at Q positions, next_tokens [R, Q] the tokens that follow them. Only the first
        `counts[r]` pairs of row r are real; the rest is padding.
        """

    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Like `observe`, but only copy the pairs; they are read before their row's next draft."""

    def catch_up(self, rows: range, wanted: Sequence[bool]) -> None:  # noqa: ARG002
        """Read the deferred pairs of the `wanted` rows [R]; a no-op for drafters that defer nothing."""
        return

    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        """Grow a tree below the last known token of each `drafting` row (None = all rows); other rows get no nodes."""

    def verified(
        self,
        rows: range,  # noqa: ARG002
        tree: DraftTree,  # noqa: ARG002
        logits: NodeLogits,  # noqa: ARG002
        drafting: Sequence[bool],  # noqa: ARG002
    ) -> None:
        """Read the target's `logits` at the drafted nodes, for drafters that use more than the committed pairs.

        Called after the round's host sync, before the committed pairs are observed.
        """
        return

    def finish(self, slot: int) -> None:  # noqa: ARG002
        """Learn from the complete sequence in a slot, which is emptied afterwards. By default a no-op."""
        return
