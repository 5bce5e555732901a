"""The protocol between the engine and a drafter: `SlotPairs`, what it has read of each sequence, and `Drafter`.

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
        """How many of them, from the end, were deferred and are not read yet."""


class SlotPairs(Protocol):
    """The pairs of the sequence in each slot, in whatever form a drafter keeps them."""

    forgets: bool = False
    """Whether a slot keeps its latest pairs only, so that older ones must be saved before they are dropped."""

    @property
    def slots(self) -> int:
        """How many sequences it has room for."""

    def fresh(self) -> Self:
        """Pairs of the same form, without slots."""
        made = copy.copy(self)
        made.resize(0)
        return made

    def resize(self, slots: int) -> None:
        """Start over with `slots` empty slots, which share nothing with those of before."""

    def reshape(self, slots: int, columns: int) -> None:
        """Change to `slots` slots of `columns` columns; keep what lies in both shapes."""

    def begin(self, slot: int, prompt: Sequence[int], owner: str) -> None:  # noqa: ARG002
        """A sequence with this prompt starts in an empty slot; its pairs follow, from the first one on.

        No pair has the prompt's first token. What is learnt of a sequence may serve sequences of the same `owner` only.
        """
        return

    def length(self, slot: int) -> int:
        """How many pairs a slot holds, deferred ones included."""

    def unread(self, slot: int) -> int:  # noqa: ARG002
        """How many of a slot's pairs were deferred and are not read yet."""
        return 0

    def save(self, slot: int, start: int, stop: int) -> SavedPairs:
        """A copy of a slot's pairs `[start, stop)`."""

    def load(self, slot: int, saved: Any, count: int) -> None:
        """Append the first `count` of the pairs that `save` returned.

        Raises UsageError for pairs that were read where the slot has unread ones.
        """

    def kept_from(self, slot: int) -> int:  # noqa: ARG002
        """The first pair from which on a slot has all of its pairs."""
        return 0

    def whole(self, saved: Any) -> bool:  # noqa: ARG002
        """Whether none of the pairs that `save` returned was dropped before."""
        return True

    def reusable(self, saved: Sequence[Any], count: int) -> int:  # noqa: ARG002
        """How many of the first `count` pairs that `save` returned, a row's from its first one on, are worth loading.

        After fewer the drafter would draft otherwise than if it had read them.
        """
        return count

    def truncate(self, slot: int, length: int) -> None:
        """Forget a slot's pairs from position `length` on."""

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another slot."""


class Drafter(Protocol):
    """Proposes trees of continuations of what its pairs say of a sequence."""

    pairs: SlotPairs
    """What it knows of the sequences, by slot; nothing of them is kept elsewhere."""
    taps: tuple[int, ...]
    """The boundaries of the target that it reads: taps (aux hidden states)."""
    max_fanout: int
    """The most children that it can offer of a node, such as the size of its vocabulary."""
    max_depth: int | None = None
    """The deepest tree that it can draft; None = any."""
    default_tree: str | None = None
    """The spec of the trees that it drafts best; None = nothing is known."""
    draws: bool = False
    """Whether its tokens are drawn from distributions, as a network's are, and not found, as copied ones are."""
    computes: bool = True
    """Whether a draft is computed, and not only found at next to no cost."""
    looks_up: bool = False
    """Whether some of its tokens are found in what is known."""
    module: nn.Module | None = None
    """The network that it drafts with; None = it has none."""
    priced: Drafter | None = None
    """The drafter whose costs are its own; None = itself."""

    def fresh(self) -> Self:
        """A drafter of the same weights with slots of its own, of which there are none yet."""
        made = copy.copy(self)
        made.pairs = self.pairs.fresh()
        return made

    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Read pairs that the target has committed, in a round or in prefill.

        taps [R, Q, A, Ht] are the states at some positions, next_tokens [R, Q] the tokens that follow them; only the
        first `counts[r]` of each row are real.
        """

    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        """Like `observe`, but pairs are only copied; they are read before the next draft of their row."""

    def catch_up(self, rows: range, wanted: Sequence[bool]) -> None:  # noqa: ARG002
        """Read what the `wanted` rows [R] have deferred; those that defer nothing needn't do anything."""
        return

    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        """Grow a tree below the last known token of each `drafting` row (None = of all rows); others get no nodes."""

    def verified(
        self,
        rows: range,  # noqa: ARG002
        tree: DraftTree,  # noqa: ARG002
        logits: NodeLogits,  # noqa: ARG002
        drafting: Sequence[bool],  # noqa: ARG002
    ) -> None:
        """The target's `logits` of the tree that was drafted, for drafters that learn from more than what is committed.

        Comes after the round's host sync, before the committed pairs.
        """
        return

    def finish(self, slot: int) -> None:  # noqa: ARG002
        """The sequence in a slot is complete; the slot is emptied after this. By default nothing is learnt of it."""
        return
