"""Two drafters in one: guesses of a model, a network or a small LM, and lookups such as copied passages, in one tree.

Both hold the same pairs. A lookup costs almost nothing, so it comes first. If copies alone are expected to make more
tokens in the network's time than the network would add, the network computes nothing and its pairs are deferred.
Otherwise both trees are united (`eyas.tree.union`). Nodes are kept by the measured acceptance of similar nodes: by the
engine's statistics or, for specs without them, by the drafter's own.

Shapes: R rows (a contiguous range of slots), Q pairs, A taps, Ht target hidden.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from eyas.drafters.base import Drafter, SavedPairs, SlotPairs
from eyas.drafters.history import LookupDrafter
from eyas.errors import InvariantError
from eyas.runtime import to_device
from eyas.targets.slots import SlotCache
from eyas.tree import DraftTree, NodeLogits, TreeSpec
from eyas.tree.acceptance import LearnedValues
from eyas.tree.draft_tree import Lookup
from eyas.tree.proposal import found_tree, on_device, predicted_rows
from eyas.tree.union import expected_levels, unite
from eyas.tree.values import ValueTable
from eyas.types import Owner
from eyas.verify import Coupling

_DECAY = 0.95
"""The factor by which a round's weight in running means decays with each later round."""


class SavedHybridPairs(NamedTuple):
    """Pairs copied out of a slot, for both drafters."""

    network: SavedPairs
    lookup: SavedPairs

    @property
    def unread(self) -> int:
        return self.network.unread


class HybridPairs(SlotPairs):
    """The same pairs twice: as the network keeps them, and as the lookup does."""

    def __init__(self, network: SlotPairs, lookup: SlotPairs) -> None:
        self.network = network
        self.lookup = lookup
        self.forgets = network.forgets

    @property
    def slots(self) -> int:
        return self.network.slots

    def fresh(self) -> HybridPairs:
        return HybridPairs(self.network.fresh(), self.lookup.fresh())

    def resize(self, slots: int) -> None:
        self.network.resize(slots)
        self.lookup.resize(slots)

    def attach(self, cache: SlotCache) -> None:
        self.network.attach(cache)
        self.lookup.attach(cache)

    def reshape(self, slots: int, columns: int) -> None:
        self.network.reshape(slots, columns)
        self.lookup.reshape(slots, columns)

    def begin(self, slot: int, prompt: Sequence[int], owner: Owner, prediction: Sequence[int] = ()) -> None:
        self.network.begin(slot, prompt, owner, prediction)
        self.lookup.begin(slot, prompt, owner, prediction)

    def length(self, slot: int) -> int:
        length = self.network.length(slot)
        other = self.lookup.length(slot)
        if other != length:
            raise InvariantError(f"slot {slot}: the network has {length} pairs, the lookup drafter {other}")
        return length

    def unread(self, slot: int) -> int:
        return self.network.unread(slot)

    def save(self, slot: int, start: int, stop: int) -> SavedHybridPairs:
        return SavedHybridPairs(self.network.save(slot, start, stop), self.lookup.save(slot, start, stop))

    def load(self, slot: int, saved: SavedHybridPairs, count: int) -> None:
        self.network.load(slot, saved.network, count)
        self.lookup.load(slot, saved.lookup, count)

    def kept_from(self, slot: int) -> int:
        return self.network.kept_from(slot)

    def whole(self, saved: SavedHybridPairs) -> bool:
        return self.network.whole(saved.network)

    def reusable(self, saved: Sequence[SavedHybridPairs], count: int) -> int:
        return self.network.reusable([one.network for one in saved], count)

    def truncate(self, slot: int, length: int) -> None:
        self.network.truncate(slot, length)
        self.lookup.truncate(slot, length)

    def move(self, source: int, target: int) -> None:
        self.network.move(source, target)
        self.lookup.move(source, target)


class _Drafted(NamedTuple):
    """A round's draft, until its outcome is observed."""

    tree: DraftTree
    learns: bool
    """Whether the drafter's own acceptance statistics learn from its outcome."""
    rested: bool
    """Whether the network computed nothing."""


class HybridDrafter(Drafter):
    """Drafts with a network, and with passages looked up in the sequence and in other texts."""

    looks_up = True
    reads_on_host = True

    def __init__(self, network: Drafter, lookup: LookupDrafter, device: torch.device) -> None:
        """Unite the drafts of two drafters for the same target, which is on `device`."""
        self.network = network
        self.lookup = lookup
        self._device = device
        self.pairs: HybridPairs = HybridPairs(network.pairs, lookup.pairs)
        self.module = network.module
        self.priced = network
        self.taps = network.taps
        self.max_fanout = network.max_fanout
        self.default_tree, self.fixed_tree = network.default_tree, network.fixed_tree
        self._values = LearnedValues()
        self._mean_accepted: float | None = None
        """Running mean of the accepted tokens per row when the network drafts; None = it never did."""
        self._last: _Drafted | None = None
        self._drafting: float | None = None
        self._verifying: float | None = None
        """Running means of the seconds of the network's drafts, and of the rest of a round."""
        self._drafted_at = 0.0

    def fresh(self) -> Self:
        return type(self)(self.network.fresh(), self.lookup.fresh(), self._device)

    def observe(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        last = self._last
        self._last = None
        if last is not None and any(counts) and len(last.tree.tokens) == len(rows):  # else the round was aborted
            self._verifying = _mean(self._verifying, time.perf_counter() - self._drafted_at)
            self._learn(last, next_tokens, counts)
        self.lookup.observe(rows, next_tokens, taps, counts)
        rested = last is not None and last.rested
        give = self.network.defer if rested else self.network.observe
        give(rows, self._for_network(next_tokens), taps, counts)

    def defer(self, rows: range, next_tokens: Tensor, taps: Tensor, counts: Sequence[int]) -> None:
        self.lookup.defer(rows, next_tokens, taps, counts)
        self.network.defer(rows, self._for_network(next_tokens), taps, counts)

    def _for_network(self, tokens: Tensor) -> Tensor:
        """Tokens where the network reads them."""
        there = tokens.device == self._device or self.network.reads_on_host
        return tokens if there else to_device(tokens.tolist(), self._device)

    def verified(self, rows: range, tree: DraftTree, logits: NodeLogits, drafting: Sequence[bool]) -> None:
        self.network.verified(rows, tree, logits, drafting)
        if self._last is not None:
            self._last = self._last._replace(tree=tree)

    def catch_up(self, rows: range, wanted: Sequence[bool], max_pairs: int | None = None) -> None:
        self.network.catch_up(rows, wanted, max_pairs)

    def finish(self, slot: int) -> None:
        self.network.finish(slot)
        self.lookup.finish(slot)

    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        wanted = [True] * len(rows) if drafting is None else drafting
        began = time.perf_counter()
        # depth only limits the network: a found passage costs nodes, not levels
        proposals = (
            self.lookup.proposals(rows, spec.max_nodes, spec.max_fanout, coupling, drafting) if spec.looks_up else []
        )
        some = any(proposal.tokens for proposal in proposals)
        copies = (
            found_tree(proposals, spec.max_fanout == 1) if some else DraftTree.empty(len(rows), torch.device("cpu"))
        )
        values = self._values.table if spec.values is None else spec.values
        groups = torch.tensor(spec.groups or (0,) * len(rows))
        rests = spec.found_only or (some and self._copies_suffice(copies, wanted, spec, values, groups))
        device = self._device
        if rests:
            tree = unite(spec, None, copies, values, groups) if some else copies
            tree = replace(on_device(tree, device), lookup=Lookup(alone=True, proposals=proposals))
        else:
            searched = time.perf_counter()
            tree = self.network.draft(rows, spec, coupling, drafting)
            drafted = time.perf_counter()
            self._drafting = _mean(self._drafting, drafted - searched)
            if some:
                tree = unite(spec, tree, on_device(copies, device), values, groups.to(device, non_blocking=True))
            if spec.looks_up:
                seconds = searched - began + time.perf_counter() - drafted
                tree = replace(tree, lookup=replace(tree.lookup, seconds=seconds))
        tree = replace(tree, lookup=replace(tree.lookup, predicted=predicted_rows(proposals)))
        self._drafted_at = time.perf_counter()
        self._last = _Drafted(tree, spec.values is None and tree.size > 0, rests)
        return tree

    def _copies_suffice(
        self, copies: DraftTree, wanted: Sequence[bool], spec: TreeSpec, values: ValueTable, groups: Tensor
    ) -> bool:
        """Whether the `wanted` rows' copies alone give more tokens per second than with the network's guesses.

        With c[k] and n[k], how likely copies and guesses are right down to level k, a round brings 1 + sum(c) tokens
        without guesses, and at most sum(n * (1 - c)) more with them. The network computes its levels for all rows
        together, so it drafts for all rows if it is worth its time. It always drafts if copies promise less than its
        own average, or less than a token, because otherwise it might never be used again.
        """
        if self._mean_accepted is None or self._drafting is None or not self._verifying:
            return False
        least = max(1.0, self._mean_accepted)
        if copies.max_depth < least:  # a token a level at most
            return False
        continues = self._mean_accepted / (1.0 + self._mean_accepted)  # n[k] = continues ** k, whose sum is the mean
        alone = added = needed = 0.0
        for levels, want in zip(expected_levels(copies, values, groups, spec.copy_exponents), wanted, strict=True):
            if want:
                alone += 1.0 + sum(levels)
                needed += 1.0 + least
                added += self._mean_accepted - sum(continues**k * right for k, right in enumerate(levels, 1))
        return alone >= needed and self._drafting / self._verifying * alone >= added

    def _learn(self, drafted: _Drafted, next_tokens: Tensor, counts: Sequence[int]) -> None:
        """Learn from the outcome of a round: the first `counts[r]` of next_tokens [R, Q] were committed in row r."""
        if not drafted.rested:
            for count in counts:
                if count:
                    self._mean_accepted = _mean(self._mean_accepted, count - 1.0)
        if not drafted.learns:
            return
        paths = [
            _walked(children, tokens[: max(0, count - 1)])
            for children, tokens, count in zip(_children(drafted.tree), next_tokens.tolist(), counts, strict=True)
        ]
        self._values.learn(drafted.tree, paths, np.zeros(len(paths), dtype=np.int64))


def _mean(mean: float | None, value: float) -> float:
    """A running mean, after one more value; None = there was none yet."""
    return value if mean is None else mean + (1.0 - _DECAY) * (value - mean)


def _children(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """For each row: (parent's node index, token) -> node index, of its valid nodes."""
    rows = zip(tree.parents.tolist(), tree.tokens.tolist(), tree.valid.tolist(), strict=True)
    return [
        {(parent + 1, token): node for node, (parent, token, valid) in enumerate(zip(*row, strict=True), 1) if valid}
        for row in rows
    ]


def _walked(children: dict[tuple[int, int], int], tokens: Sequence[int]) -> list[int]:
    """The node indexes from the root along accepted `tokens`, as far as they are in the tree."""
    path = [0]
    for token in tokens:
        node = children.get((path[-1], token))
        if node is None:
            break
        path.append(node)
    return path
