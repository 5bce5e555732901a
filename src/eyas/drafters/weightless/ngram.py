"""Prompt lookup: proposes what followed an earlier occurrence of the sequence's last tokens.

The n-gram method of vLLM and transformers (`prompt_lookup_num_tokens`): it takes the longest n-gram at the end that
occurred before, and its first occurrence. It needs no weights, and drafts nothing if nothing is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from eyas.drafters.history import LONGEST_MATCH, History, LookupDrafter, TokenPairs, continuation_rate
from eyas.errors import UsageError
from eyas.targets import Target
from eyas.tree.draft_tree import Proposal
from eyas.types import NO_OWNER, Owner


class NgramHistory(History):
    """A sequence, and the first occurrences of its n-grams."""

    def __init__(self, prompt: Sequence[int] = (), owner: Owner = NO_OWNER) -> None:
        super().__init__(prompt, owner)
        self.cut()

    def cut(self) -> None:
        self._followers: dict[tuple[int, ...], int] = {}
        """N-grams -> the index after their first occurrence."""
        self._indexed = 0
        """How many tokens have been indexed as ends of n-grams: all with a successor at the last draft."""

    def follower(self, sizes: Iterable[int]) -> tuple[int, int] | None:
        """The index after the first occurrence of the longest n-gram of these `sizes` that ends here, and its size."""
        tokens = self.tokens
        for end in range(self._indexed + 1, len(tokens)):
            for size in sizes:
                if size <= end:
                    self._followers.setdefault(tuple(tokens[end - size : end]), end)
        self._indexed = max(0, len(tokens) - 1)
        for size in sizes:
            found = self._followers.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if found is not None:
                return found, size
        return None


class NgramDrafter(LookupDrafter):
    """Proposes the continuation of the last tokens' first occurrence as a chain."""

    max_fanout = 1
    fixed_tree = "chain:10"
    pairs: TokenPairs[NgramHistory]

    def __init__(self, device: torch.device, longest: int = 3, shortest: int = 1) -> None:
        """Look up the last `longest` tokens, then fewer, down to `shortest`. Raises UsageError."""
        if not 1 <= shortest <= longest:
            raise UsageError(f"ngram: n-grams of {shortest} to {longest} tokens; write 1 <= shortest <= longest")
        self._sizes = range(longest, shortest - 1, -1)
        super().__init__(TokenPairs(NgramHistory), device)

    def propose(self, slot: int, depth: int, fanout: int) -> Proposal:  # noqa: ARG002
        history = self.pairs[slot]
        found = history.follower(self._sizes)
        if found is None:
            return Proposal()
        start, match = found
        tokens = history.tokens
        while match < min(LONGEST_MATCH, start) and tokens[start - 1 - match] == tokens[-1 - match]:
            match += 1
        followers = tokens[start : start + depth]
        return Proposal.chain(
            followers, [math.log(continuation_rate(match + level)) for level in range(len(followers))]
        )


def make(target: Target) -> NgramDrafter:
    """Prompt lookup with n-grams of three tokens down to one."""
    return NgramDrafter(target.device)
