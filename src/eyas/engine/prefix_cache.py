"""Prefix caching: requests with a common prefix share what target and drafter have cached for it.

`PrefixStore` is a radix tree of token blocks, each with a payload. A block is identified by its tokens and all tokens
before it, so a path from the root is a prefix of some sequence. Blocks hold `BLOCK` tokens; only a sequence's last
block may be shorter, and it has no children. A lookup may end inside a block and use the first part of its payload.
When the store is full, blocks without children are evicted, least recently used first. Each salt (in the server, each
API key) has a tree of its own, because cache hits on another client's prefixes would reveal, by response times, what it
asked.

`PrefixCache` makes the payloads: copies of a slot's columns in the target's cache and of the drafter's pairs. The pair
at position i needs token i + 1, so a block of tokens [a, b) holds columns [a, b) and pairs [a - 1, b - 1). So a prefix
of B tokens yields B - 1 of both, and the next pass reads one token again. At least one pair would have to be read again
anyway, because the drafter keeps only the state of its last pair. Deferred pairs are stored unread, and replaced once
they have been read.

Recurrent states are large and can't be cut to a shorter prefix. So a slot copies the states after the last whole block
that it has passed, and where it leaves a prefix that others share. A prefix of B tokens needs the states after B - 1. A
lookup ends at the last block that has states.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Generic, TypeVar
from weakref import ref

from eyas.drafters.base import Drafter, SavedPairs, SlotPairs
from eyas.engine.sequence import SequenceState
from eyas.errors import InvariantError
from eyas.targets.slots import Saved, SlotCache
from eyas.targets.states import SlotStates, States

# With blocks of 32 tokens, block 0 has columns 0 to 31 and pairs 0 to 30, block 1 columns 32 to 63 and pairs 31 to 62.
# A prefix of 64 tokens gives a new sequence 63 columns and 63 pairs; its next pass reads token 63 again.
BLOCK = 32
_MIN_STATES = 8
"""The number of recurrent states that may be kept, however small the limit."""

P = TypeVar("P")


@dataclass(eq=False)
class PrefixBlock(Generic[P]):
    """A node of the radix tree: tokens `[start, start + len(tokens))` of all sequences that begin with its path."""

    tokens: tuple[int, ...]
    start: int
    parent: PrefixBlock[P] | None
    payload: P | None
    children: dict[tuple[int, ...], PrefixBlock[P]] = field(default_factory=dict)
    used: int = 0


class PrefixStore(Generic[P]):
    """A radix tree of at most `limit` tokens with a payload for each block; knows nothing of tensors."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        """Number of tokens held."""
        self._roots: dict[str, PrefixBlock[P]] = {}  # by salt
        self._count = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, PrefixBlock[P]]] = []  # a heap by last use; entries may be out of date
        self._entries = 0

    def match(self, tokens: Sequence[int], salt: str = "") -> list[tuple[int, int, P]]:
        """The longest cached prefix of `tokens` for `salt`: of each block, the start, number of tokens, and payload."""
        self._clock += 1
        found: list[tuple[int, int, P]] = []
        block = self._roots.get(salt)
        start = 0
        while block is not None and start < len(tokens):
            rest = tuple(tokens[start : start + BLOCK])
            child = block.children.get(rest)
            count = len(rest)
            if child is None:
                child, count = _closest(block, rest)
            if child is None or child.payload is None:
                break
            child.used = self._clock
            found.append((start, count, child.payload))
            block = child
            start += count
            if count < BLOCK:
                break
        return found

    def insert(
        self,
        tokens: Sequence[int],
        save: Callable[[int, int], P],
        renew: Callable[[P, int, int], P],
        tail: bool = True,
        salt: str = "",
    ) -> None:
        """Cache `tokens` for `salt`: `save(start, stop)` makes the payload of a new block.

        The payload of a block that exists already is replaced by `renew(payload, start, stop)`. Without `tail` only
        whole blocks are kept.
        """
        self._clock += 1
        self._roots = {each: root for each, root in self._roots.items() if root.children}
        block = self._roots.setdefault(salt, PrefixBlock((), 0, None, None))
        for start in range(0, len(tokens), BLOCK):
            rest = tuple(tokens[start : start + BLOCK])
            stop = start + len(rest)
            child = block.children.get(rest)
            if child is not None and child.payload is not None:
                child.payload = renew(child.payload, start, stop)
            else:
                if len(rest) < BLOCK and (not tail or _closest(block, rest)[1] == len(rest)):
                    return
                for shorter in [c for key, c in block.children.items() if key == rest[: len(key)]]:
                    self._remove(shorter)
                block.used = self._clock
                if not self._make_room(len(rest)):
                    return
                child = PrefixBlock(rest, start, block, save(start, stop))
                block.children[rest] = child
                self.size += len(rest)
                self._count += 1
                self._push(child)
            child.used = self._clock
            block = child

    def check(self) -> None:
        """Raise InvariantError if the tree and its counts disagree."""
        size = count = 0
        for block in self._walk():
            size += len(block.tokens)
            count += 1
            if block.payload is None or block.parent is None or block.parent.children.get(block.tokens) is not block:
                raise InvariantError(f"prefix block at {block.start} is detached from the tree")
            if len(block.tokens) < BLOCK and block.children:
                raise InvariantError(f"prefix block at {block.start} is short and has children")
        if (size, count) != (self.size, self._count) or size > self.limit:
            raise InvariantError(f"prefix blocks hold {size} tokens, {self.size} were counted, limit {self.limit}")
        entered = {id(block) for _, _, block in self._leaves}
        if any(not block.children and id(block) not in entered for block in self._walk()):
            raise InvariantError("a prefix block could never be evicted")

    def _walk(self) -> Iterator[PrefixBlock[P]]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            block = stack.pop()
            stack += block.children.values()
            yield block

    def _make_room(self, count: int) -> bool:
        """Evict old leaves until `count` tokens fit; False if only leaves that were used just now remain."""
        while self.size + count > self.limit:
            leaf = self._oldest_leaf()
            if leaf is None:
                return False
            self._remove(leaf)
        return True

    def _oldest_leaf(self) -> PrefixBlock[P] | None:
        while self._leaves:
            used, _, block = self._leaves[0]
            if block.payload is None or block.children:
                heapq.heappop(self._leaves)
            elif block.used != used:
                heapq.heappop(self._leaves)
                self._push(block)
            else:
                return None if used == self._clock else block
        return None

    def _remove(self, block: PrefixBlock[P]) -> None:
        parent = block.parent
        assert parent is not None
        del parent.children[block.tokens]
        block.payload = None
        self.size -= len(block.tokens)
        self._count -= 1
        if not parent.children and parent.parent is not None:
            self._push(parent)

    def _push(self, block: PrefixBlock[P]) -> None:
        self._entries += 1
        heapq.heappush(self._leaves, (block.used, self._entries, block))
        if len(self._leaves) > 64 + 4 * self._count:
            current = {id(entry[2]): entry for entry in self._leaves if entry[2].payload is not None}
            self._leaves = [entry for entry in current.values() if not entry[2].children]
            heapq.heapify(self._leaves)


def _closest(block: PrefixBlock[P], tokens: tuple[int, ...]) -> tuple[PrefixBlock[P] | None, int]:
    """The child that shares most of `tokens`, and how many."""
    best, most = None, 0
    for key, child in block.children.items():
        if key[0] != tokens[0]:
            continue
        shared = next((i for i, (a, b) in enumerate(zip(key, tokens, strict=False)) if a != b), None)
        count = min(len(key), len(tokens)) if shared is None else shared
        if count > most:
            best, most = child, count
    return best, most


@dataclass(frozen=True)
class SavedBlock:
    """The payload of a block: what target and drafter have cached for its tokens."""

    columns: Saved
    pairs: SavedPairs | None
    """None without a drafter, or where it didn't observe the request."""
    states: SavedStates | None = None
    """None where there are no recurrent layers, or none has passed the block's end."""


@dataclass(eq=False)
class SavedStates:
    """Recurrent states after all tokens of a prefix but the last."""

    held: States | None
    """None = they were evicted."""


class SavedStatesLru:
    """At most `max_saved` saved states; the least recently used are evicted."""

    def __init__(self, max_saved: int) -> None:
        self.max_saved = max_saved
        self._by_use: list[ref[SavedStates]] = []  # weak, so that states of evicted blocks are freed

    def put(self, states: States) -> SavedStates:
        """Keep states, as the most recently used ones."""
        there = [saved for saved in self._alive() if saved.held is not None]
        for saved in there[: max(0, len(there) + 1 - self.max_saved)]:
            saved.held = None
        made = SavedStates(states)
        self._by_use = [*(ref(saved) for saved in there if saved.held is not None), ref(made)]
        return made

    def use(self, used: SavedStates) -> None:
        """Mark states as used just now."""
        self._by_use = [*(ref(saved) for saved in self._alive() if saved is not used), ref(used)]

    def __len__(self) -> int:
        return sum(saved.held is not None for saved in self._alive())

    def _alive(self) -> list[SavedStates]:
        return [saved for one in self._by_use if (saved := one()) is not None]


class PrefixCache:
    """Prefixes, and the slots of target and drafter that they are copied from and to."""

    def __init__(self, cache: SlotCache, drafter: Drafter | None, limit: int) -> None:
        """Saved recurrent states take at most the memory of `limit` tokens' keys and values; a few are always kept."""
        self.store: PrefixStore[SavedBlock] = PrefixStore(limit)
        self.saved_states = SavedStatesLru(0)
        self._cache = cache
        self._pairs = None if drafter is None else drafter.pairs
        if cache.states is not None:
            cache.states.copies.every = BLOCK
            self.saved_states.max_saved = max(_MIN_STATES, limit * cache.column_bytes // cache.states.slot_bytes)

    def clear(self) -> None:
        """Forget all prefixes."""
        self.store = PrefixStore(self.store.limit)

    def load(self, sequence: SequenceState) -> int:
        """Copy the longest held prefix into a sequence's empty slot; returns its number of tokens."""
        slot = sequence.slot
        assert slot is not None
        found = self.store.match(sequence.window(0, sequence.known), sequence.request.cache_salt)
        kept = self._pairs_of(sequence)
        if kept is not None:
            found = list(takewhile(lambda block: block[2].pairs is not None, found))
        reusable = sum(count for _, count, _ in found) - 1
        if kept is not None:
            reusable = kept.reusable([saved.pairs for _, _, saved in found], reusable)
        if self._cache.states is not None:
            reusable = self._load_states(self._cache.states, slot, found, reusable, kept)
        if reusable < 1:
            return 0
        for start, count, saved in found:
            if start > reusable:
                break
            self._cache.copy_in(slot, saved.columns, min(count, reusable - start))
            if kept is not None and saved.pairs is not None:
                kept.load(slot, saved.pairs, min(start + count - 1, reusable) - max(start - 1, 0))
        return reusable

    def _load_states(
        self,
        states: SlotStates,
        slot: int,
        found: Sequence[tuple[int, int, SavedBlock]],
        reusable: int,
        kept: SlotPairs | None,
    ) -> int:
        """Load the states of the longest found prefix that has any; returns its length, at most `reusable` tokens.

        If a longer prefix is shared, its states are copied once the slot has read it, for the next sequence with it.
        """
        pairs = [saved.pairs for _, _, saved in found]
        reached = 0
        for start, _, block in reversed(found):
            tokens = start + BLOCK - 1
            saved = block.states
            if saved is None or saved.held is None or tokens > reusable:
                continue
            if kept is None or kept.reusable(pairs, tokens) == tokens:
                states.load(slot, saved.held)
                self.saved_states.use(saved)
                reached = tokens
                break
        shared = sum(count for _, count, _ in found) // BLOCK * BLOCK - 1
        if shared > reached:
            states.copies.mark(slot, shared)
        return reached

    def save(self, sequence: SequenceState, tail: bool) -> None:
        """Keep copies of what a sequence's slot holds; without `tail` (it will continue), whole blocks only."""
        slot = sequence.slot
        assert slot is not None
        size = min(sequence.cached, sequence.known)
        kept = self._pairs_of(sequence)

        def pairs(start: int, stop: int) -> SavedPairs | None:
            return None if kept is None else kept.save(slot, max(start - 1, 0), stop - 1)

        def states(stop: int) -> SavedStates | None:
            copied = None if self._cache.states is None else self._cache.states.copies.of(slot).get(stop - 1)
            return None if copied is None else self.saved_states.put(copied)

        def save(start: int, stop: int) -> SavedBlock:
            return SavedBlock(self._cache.copy_out(slot, start, stop), pairs(start, stop), states(stop))

        def renew(saved: SavedBlock, start: int, stop: int) -> SavedBlock:
            if saved.states is None or saved.states.held is None:
                saved = replace(saved, states=states(stop))
            if kept is None:
                return saved
            if saved.pairs is None:
                return replace(saved, pairs=pairs(start, stop))
            if kept.kept_from(slot) > max(start - 1, 0) or (not saved.pairs.unread and kept.whole(saved.pairs)):
                return saved
            read = kept.length(slot) - kept.unread(slot)
            return replace(saved, pairs=pairs(start, stop)) if read >= stop - 1 else saved

        self.store.insert(sequence.window(0, size), save, renew, tail, sequence.request.cache_salt)

    def _pairs_of(self, sequence: SequenceState) -> SlotPairs | None:
        return self._pairs if sequence.observed else None
