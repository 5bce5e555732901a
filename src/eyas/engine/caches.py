"""Everything that has slots, moved together: the target's cache, the drafter's, the sampler's state.

Several engines may share a target: `Target.holder` says whose sequences lie in the slots. Whoever finds another's
name there, or nobody's because a pass broke off, has lost what was in them and reads it again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import cast

import torch

from eyas.drafters import Drafter, observe_rows
from eyas.engine.scheduler import CacheRoom, Move, Piece
from eyas.engine.sequence import SequenceState
from eyas.errors import InvariantError
from eyas.targets import Target
from eyas.tree import TreeSpec
from eyas.tree.shared import SharedTree
from eyas.verify import Sampler


class SlotCaches:
    """The slots of one engine's sequences."""

    def __init__(self, target: Target, drafter: Drafter | None, most_slots: int) -> None:
        self.target, self.drafter = target, drafter
        self._parts: list[Target | Drafter] = [target] if drafter is None else [target, drafter]
        self._most_slots = most_slots
        self._writing = False
        self.renew_sampler()

    def renew_sampler(self) -> None:
        """Forget all sampling state; nobody may be in a slot."""
        self.sampler = Sampler(self._most_slots, self.target.vocab_size, self.target.device)

    def claim(self, room: CacheRoom) -> bool:
        """Begin to write: False if the slots are not as `release` left them; they are empty then.

        Until `release` they belong to nobody.
        """
        kept = self.target.holder is self
        self.target.holder, self._writing = None, True
        if not kept:
            room.slots, room.columns = self.target.slots, self.target.cache.capacity
            if room.slots > self._most_slots or not room.fits(room.slots, room.columns):
                self.target.resize(0)
                room.slots = 0
            for part in self._parts:
                for slot in range(part.slots):
                    part.truncate(slot, 0)
            self.cover(room)
        return kept

    def release(self, intact: bool) -> None:
        """End a `claim`; if not all is in order the slots belong to nobody."""
        self._writing = False
        self.target.holder = self if intact else None

    def give_back(self) -> None:
        """Let go of all memory, and of all that is in the slots."""
        for part in self._parts:
            part.resize(0)

    @property
    def held(self) -> bool:
        """Do the slots hold our sequences?"""
        return self._writing or self.target.holder is self

    def cover(self, room: CacheRoom) -> None:
        """Take the shape of `room`."""
        for part in self._parts:
            part.reshape(room.slots, room.columns)

    def enter(self, sequence: SequenceState, eos_ids: Sequence[int]) -> None:
        """Begin a sequence in its slot. RequestError if it can't be sampled."""
        assert sequence.slot is not None
        request = sequence.request
        self.sampler.admit(sequence.slot, request.params, request.prompt, eos_ids, sequence.tokens, sequence.grammar)

    def prefill(self, piece: Piece, chunk: int, drafting: bool) -> None:
        """Read on, `chunk` tokens a pass; the drafter reads along only while it is `drafting`."""
        told = [one.request.speculate for one in piece.sequences]
        drafter = self.drafter if any(told) else None
        taps = () if drafter is None else drafter.taps
        for part in self.target.prefill(piece.rows, piece.windows(), taps, chunk):
            if drafter is not None:
                reading = [drafting] * len(told)
                observe_rows(drafter, piece.rows, part.next_tokens, part.taps, part.counts, told, reading)
        for sequence, count in zip(piece.sequences, piece.counts, strict=True):
            sequence.cached += count

    def move(self, freed: Iterable[int], moves: Iterable[Move]) -> None:
        """Empty slots, then close the gaps."""
        for slot in freed:
            for part in self._parts:
                part.truncate(slot, 0)
        for source, target in moves:
            self.sampler.move(source, target)
            for part in self._parts:
                part.move(source, target)

    def check(self, placed: Sequence[SequenceState], room: CacheRoom) -> None:
        """InvariantError unless every slot holds what its sequence says."""
        columns, counted = self.target.cache.capacity, room.columns
        if columns != counted and self.target.slots:
            raise InvariantError(f"the target's cache has {columns} columns, the scheduler counts {counted}")
        for part in self._parts:
            name = type(part).__name__
            if part.slots != room.slots:
                raise InvariantError(f"{name} has {part.slots} slots, the scheduler counts {room.slots}")
            for slot in range(part.slots):
                held = slot < len(placed) and (part is self.target or placed[slot].request.speculate)
                expected = placed[slot].cached if held else 0
                if part.length(slot) != expected:
                    raise InvariantError(f"{name} holds {part.length(slot)} in slot {slot}, expected {expected}")


# How many cache columns a round takes beyond what is committed.


def staging_columns(spec: TreeSpec | None) -> int:
    """Most columns that a round with such a tree stages.

    Those are root and nodes in the target's cache, guesses in the drafter's.
    """
    if spec is None:
        return 1
    if isinstance(spec, SharedTree):  # a new one each round
        return 1 + max(min(spec.budget, spec.per_row or spec.budget), spec.depth * spec.width)
    return _grown(cast(Hashable, spec))


@lru_cache(maxsize=256)
def _grown(hashable: Hashable) -> int:
    """By growing a tree of nothing."""
    spec = cast(TreeSpec, hashable)
    growth = spec.start(1, torch.device("cpu"))
    width, guesses = 1, 0
    for _ in range(spec.depth):
        tokens = torch.arange(width * growth.fanout).view(1, width, growth.fanout)
        frontier = growth.expand(torch.zeros(tokens.shape), tokens)
        if frontier is None:
            break
        width = frontier.tokens.shape[1]
        guesses += width
    return 1 + max(growth.tree().size, guesses)
