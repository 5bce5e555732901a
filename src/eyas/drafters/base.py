"""The protocol between the engine and a drafter: `Drafter`, and `SlotPairs`, the store of each sequence's pairs.

A pair is a drafter's input: the target's state at a position and the token that follows it. `DeferredPairs` holds pairs
that haven't been read yet.

Shapes: R rows (a contiguous range of slots), Q positions, A taps, Ht target hidden.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import Self

from eyas.runtime import mapped_copy, to_device
from eyas.targets.slots import SlotCache
from eyas.tree import DraftTree, NodeLogits, TreeSpec
from eyas.types import Owner
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

    def attach(self, cache: SlotCache) -> None:  # noqa: ARG002
        """Take the target's cache over the same slots, for drafters that read its keys and values.

        Called before the first slot is made. A slot's committed columns there are its sequence without the last token.
        """
        return

    def reshape(self, slots: int, columns: int) -> None:
        """Resize to `slots` slots of `columns` columns; keep the contents that fit."""

    def begin(
        self,
        slot: int,  # noqa: ARG002
        prompt: Sequence[int],  # noqa: ARG002
        owner: Owner,  # noqa: ARG002
        prediction: Sequence[int] = (),  # noqa: ARG002
    ) -> None:
        """Start a sequence with this prompt in an empty slot; its pairs follow, beginning with the first.

        `prediction` is what its answer is expected to repeat.

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
    """Maximum number of children that it can offer for a node, such as the size of its vocabulary."""
    max_depth: int | None = None
    """The deepest tree that it can draft; None = any."""
    default_tree: str | None = None
    """The tree spec that its checkpoint asks for, or `auto` where no fixed one is sure to pay; None = unknown."""
    fixed_tree: str = "dynamic:5,6,24"
    """Its shape where all rounds need the same one. Unless a method has another, it is deep rather than wide, and small
    enough to be nearly free to verify on an accelerator."""
    draws: bool = False
    """Whether its tokens come from distributions, as a network's do, rather than from a lookup."""
    computes: bool = True
    """Whether drafting takes computation, rather than a lookup at almost no cost."""
    looks_up: bool = False
    """Whether some of its tokens come from a lookup in known texts."""
    reads_on_host: bool = False
    """Whether it reads tokens on the host: `observe` and `defer` are given them there."""
    needs_hint: bool = False
    """Whether it drafts only for requests that say something of their answers: a prediction or a grammar."""
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

    def catch_up(self, rows: range, wanted: Sequence[bool], max_pairs: int | None = None) -> None:  # noqa: ARG002
        """Read the deferred pairs of the `wanted` rows [R], the first `max_pairs` of each (None = all).

        A no-op for drafters that defer nothing.
        """
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

        Called after the round's host sync, before the committed pairs are observed; `tree` is on the host.
        """
        return

    def finish(self, slot: int) -> None:  # noqa: ARG002
        """Learn from the complete sequence in a slot, which is emptied afterwards. By default a no-op."""
        return


_MAX_HELD = 64
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
        """Unsorted appends of one shape: tokens [R, Q], taps [R, Q, A, Ht], and pairs as slot and index into R * Q."""

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
        if sum(counts) > _MAX_HELD:
            self._sort()
            for row, slot, count in given:
                self._pieces[slot].append(_Piece(next_tokens[row, :count], taps[row, :count]))
        elif given:
            if len(self._held) >= _MAX_HELD or (self._held and self._held[0][0].shape != next_tokens.shape):
                self._sort()
            width = next_tokens.shape[1]
            pairs = [(slot, row * width + i) for row, slot, count in given for i in range(count)]
            self._held.append((next_tokens, taps, pairs))

    def _sort(self) -> None:
        """Move the held pairs to their slots."""
        if not self._held:
            return
        held = self._held
        self._held = []
        all_tokens, all_taps, all_pairs = zip(*held, strict=True)
        found: dict[int, list[int]] = defaultdict(list)
        for number, pairs in enumerate(all_pairs):
            for slot, index in pairs:
                found[slot].append(number * all_tokens[0].numel() + index)
        order = to_device([index for indices in found.values() for index in indices], all_tokens[0].device)
        tokens, taps = (torch.cat(parts).flatten(0, 1).index_select(0, order) for parts in (all_tokens, all_taps))
        sorted_pairs = _Piece(tokens, taps)
        start = 0
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
        self._pieces[target] = self._pieces[source]
        self._pieces[source] = []
        self.lengths[target] = self.lengths[source]
        self.lengths[source] = 0
