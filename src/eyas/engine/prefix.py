"""What sequences that begin alike share: a tree of blocks of tokens, each with what was cached for them.

A block is known by its tokens and by all that come before it, so a path from the root is a prefix some sequence had.
Blocks hold `BLOCK` tokens; only a sequence's last may be shorter, and has no children. What is looked up may end inside
a block: of what is cached for it the first part is as good. Blocks without children are forgotten when the room runs
out, those not used for longest first. No tensors here: the payload is the caller's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from eyas.errors import InvariantError

BLOCK = 32

P = TypeVar("P")


@dataclass(eq=False)
class Block(Generic[P]):
    """Tokens `[start, start + len(tokens))` of all sequences that begin with its path."""

    tokens: tuple[int, ...]
    start: int
    parent: Block[P] | None
    payload: P | None
    children: dict[tuple[int, ...], Block[P]] = field(default_factory=dict)
    used: int = 0


class PrefixStore(Generic[P]):
    """At most `limit` tokens in blocks."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        """Tokens held."""
        self._root: Block[P] = Block((), 0, None, None)
        self._count = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, Block[P]]] = []  # a heap by last use; entries may be out of date
        self._entries = 0

    def match(self, tokens: Sequence[int]) -> list[tuple[int, int, P]]:
        """The longest prefix of `tokens` that is held: each block's start, how much of it is shared, its payload."""
        self._clock += 1
        found: list[tuple[int, int, P]] = []
        block, place = self._root, 0
        while place < len(tokens):
            rest = tuple(tokens[place : place + BLOCK])
            child = block.children.get(rest)
            count = len(rest)
            if child is None:
                child, count = _closest(block, rest)
            if child is None or child.payload is None:
                break
            child.used = self._clock
            found.append((place, count, child.payload))
            block, place = child, place + count
            if count < BLOCK:
                break
        return found

    def insert(
        self,
        tokens: Sequence[int],
        save: Callable[[int, int], P],
        renew: Callable[[P, int, int], P],
        tail: bool = True,
    ) -> None:
        """Hold `tokens`: `save(start, stop)` makes the payload of a block that isn't there yet.

        What is there already is replaced by `renew(payload, start, stop)`. Without `tail` only whole blocks are kept.
        """
        self._clock += 1
        block = self._root
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
                child = Block(rest, start, block, save(start, stop))
                block.children[rest] = child
                self.size += len(rest)
                self._count += 1
                self._push(child)
            child.used = self._clock
            block = child

    def check(self) -> None:
        """InvariantError if the tree and its counts disagree."""
        size = count = 0
        for block in self._walk():
            size, count = size + len(block.tokens), count + 1
            if block.payload is None or block.parent is None or block.parent.children.get(block.tokens) is not block:
                raise InvariantError(f"prefix block at {block.start} hangs loose")
            if len(block.tokens) < BLOCK and block.children:
                raise InvariantError(f"prefix block at {block.start} is short and has children")
        if (size, count) != (self.size, self._count) or size > self.limit:
            raise InvariantError(f"prefix blocks hold {size} tokens, {self.size} were counted, limit {self.limit}")
        entered = {id(block) for _, _, block in self._leaves}
        if any(not block.children and id(block) not in entered for block in self._walk()):
            raise InvariantError("a prefix block could never be evicted")

    def _walk(self) -> Iterator[Block[P]]:
        stack = list(self._root.children.values())
        while stack:
            block = stack.pop()
            stack += block.children.values()
            yield block

    def _make_room(self, count: int) -> bool:
        """Forget old leaves until `count` tokens fit; False if what was used just now is all there is."""
        while self.size + count > self.limit:
            leaf = self._oldest_leaf()
            if leaf is None:
                return False
            self._remove(leaf)
        return True

    def _oldest_leaf(self) -> Block[P] | None:
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

    def _remove(self, block: Block[P]) -> None:
        parent = block.parent
        assert parent is not None
        del parent.children[block.tokens]
        block.payload = None
        self.size -= len(block.tokens)
        self._count -= 1
        if not parent.children and parent is not self._root:
            self._push(parent)

    def _push(self, block: Block[P]) -> None:
        self._entries += 1
        heapq.heappush(self._leaves, (block.used, self._entries, block))
        if len(self._leaves) > 64 + 4 * self._count:
            current = {id(entry[2]): entry for entry in self._leaves if entry[2].payload is not None}
            self._leaves = [entry for entry in current.values() if not entry[2].children]
            heapq.heapify(self._leaves)


def _closest(block: Block[P], tokens: tuple[int, ...]) -> tuple[Block[P] | None, int]:
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
