"""Copies of what slots held, for sequences that begin alike: the target's columns and the drafter's pairs.

The drafter's pair at position i needs token i + 1, so a block of tokens [a, b) holds the target's columns [a, b) and
the pairs [a - 1, b - 1). A prefix of B tokens thus gives B - 1 of both, and the next pass reads one token again. At
least one pair must be read anew in any case: of all pairs the drafter keeps only the last one's state.
Pairs the drafter hasn't read yet (nobody wanted a draft) are kept unread, and replaced when somebody has read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from eyas.drafters import Drafter
from eyas.drafters.base import SavedPairs
from eyas.engine.prefix import PrefixStore
from eyas.engine.sequence import LiveSequence
from eyas.target import Target
from eyas.target.slots import Saved


@dataclass(frozen=True)
class SavedBlock:
    """What was cached for a block of tokens."""

    columns: Saved
    pairs: SavedPairs | None
    """None without a drafter, or where it wasn't told: the request didn't speculate."""


class PrefixReuse:
    """A store of prefixes and the slots they are copied from and to."""

    def __init__(self, target: Target, drafter: Drafter | None, limit: int) -> None:
        self.store: PrefixStore[SavedBlock] = PrefixStore(limit)
        self._target, self._drafter = target, drafter

    def load(self, sequence: LiveSequence) -> int:
        """Copy the longest held prefix into a sequence's empty slot; returns how many tokens that were."""
        slot = sequence.slot
        assert slot is not None
        found = self.store.match(sequence.window(0, sequence.known))
        drafter = self._drafter_of(sequence)
        if drafter is not None:
            found = list(takewhile(lambda block: block[2].pairs is not None, found))
        reusable = sum(count for _, count, _ in found) - 1
        if reusable < 1:
            return 0
        for start, count, saved in found:
            self._target.cache.copy_in(slot, saved.columns, min(count, reusable - start))
            if drafter is not None and saved.pairs is not None:
                drafter.load(slot, saved.pairs, start + count - 1 - max(start - 1, 0))
        return reusable

    def save(self, sequence: LiveSequence, tail: bool) -> None:
        """Keep copies of what a sequence's slot holds; without `tail` only in whole blocks, as it goes on."""
        slot = sequence.slot
        assert slot is not None
        size = min(sequence.cached, sequence.known)
        drafter = self._drafter_of(sequence)

        def pairs(start: int, stop: int) -> SavedPairs | None:
            return None if drafter is None else drafter.save(slot, max(start - 1, 0), stop - 1)

        def save(start: int, stop: int) -> SavedBlock:
            return SavedBlock(self._target.cache.copy_out(slot, start, stop), pairs(start, stop))

        def renew(saved: SavedBlock, start: int, stop: int) -> SavedBlock:
            if drafter is None or (saved.pairs is not None and not saved.pairs.unread):
                return saved
            read = drafter.length(slot) - drafter.unread(slot)
            return replace(saved, pairs=pairs(start, stop)) if saved.pairs is None or read >= stop - 1 else saved

        self.store.insert(sequence.window(0, size), save, renew, tail)

    def _drafter_of(self, sequence: LiveSequence) -> Drafter | None:
        """Who hears of the sequence."""
        return self._drafter if sequence.request.speculate else None
