"""Prompt lookup: what followed the sequence's last tokens where they occurred before is proposed again.

The n-gram method of vLLM and transformers (`prompt_lookup_num_tokens`): the longest n-gram at the end that has an
earlier occurrence, and of its occurrences the first. It needs no weights, and drafts nothing where nothing is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from eyas.drafters.history import LookupDrafter
from eyas.errors import UsageError
from eyas.targets import Target
from eyas.tree.proposal import Proposal


class NgramDrafter(LookupDrafter):
    """Proposes the continuation of the last tokens' first earlier occurrence, a chain."""

    max_fanout = 1
    default_tree = "chain:10"

    def __init__(self, device: torch.device, longest: int = 3, shortest: int = 1) -> None:
        """Look for the last `longest` tokens, then for fewer, down to `shortest`. Raises UsageError."""
        if not 1 <= shortest <= longest:
            raise UsageError(f"ngram: n-grams of {shortest} to {longest} tokens; write 1 <= shortest <= longest")
        self._sizes = range(longest, shortest - 1, -1)
        super().__init__(device)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        self._followers: list[dict[tuple[int, ...], int]] = [{} for _ in range(slots)]
        """For each slot the n-grams of its tokens -> the index after their first occurrence."""
        self._indexed = [0] * slots
        """How many of each slot's tokens can end such an n-gram: all that had a successor at the last draft."""

    def reshape(self, slots: int, columns: int) -> None:
        super().reshape(slots, columns)
        self._followers = [*self._followers[:slots], *({} for _ in range(slots - len(self._followers)))]
        self._indexed = [*self._indexed[:slots], *[0] * (slots - len(self._indexed))]

    def begin(self, slot: int, prompt: Sequence[int], owner: str) -> None:
        super().begin(slot, prompt, owner)
        self._followers[slot], self._indexed[slot] = {}, 0

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        if self._indexed[slot] >= len(self._tokens[slot]):
            self._followers[slot], self._indexed[slot] = {}, 0

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._followers[target], self._indexed[target] = self._followers[source], self._indexed[source]
        self._followers[source], self._indexed[source] = {}, 0

    def propose(self, slot: int, tokens: Sequence[int], depth: int) -> Proposal:
        followers = self._followers[slot]
        for end in range(self._indexed[slot] + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    followers.setdefault(tuple(tokens[end - size : end]), end)
        self._indexed[slot] = max(0, len(tokens) - 1)
        for size in self._sizes:
            found = followers.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if found is not None:
                # how probable it is isn't known; a controller learns what matches of each length are worth
                return Proposal.chain(tokens[found : found + depth], math.log(size / (size + 1)))
        return Proposal()


def make(target: Target) -> NgramDrafter:
    """Prompt lookup with n-grams of three tokens down to one."""
    return NgramDrafter(target.device)
