"""Where one sequence stands in its grammar, and which nodes of a draft tree the grammar allows.

All of it is host work on small objects: a matcher is copied in about a microsecond, so every place of a tree gets its
own, and what a branch does to its copy can't harm the sequence.

Ends: a grammar says when an answer may end, the model says with which token. The end tokens are allowed where the
grammar is satisfied, and nothing else is once it has nothing to add.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.errors import RequestError
from eyas.verify.grammar import Grammar


@dataclass(frozen=True)
class Standing:
    """A place some legal path reaches."""

    matcher: Any  # llguidance.LLMatcher; None behind an end token, where nothing matters any more


class Constraint:
    """One sequence's walk through a grammar. `ends` are the tokens that end an answer without being part of it."""

    def __init__(self, grammar: Grammar, ends: Collection[int]) -> None:
        if not ends:
            raise RequestError("a grammar needs an end token to finish with: the target has none, give stop_token_ids")
        self.words = (grammar.vocabulary.vocab_size + 31) // 32
        """32-bit words of a mask over the tokenizer's vocabulary."""
        self.error: str | None = None
        """Why the sequence can't go on: the grammar has run into a limit."""
        self._ends = frozenset(ends)
        self._foreign_end = grammar.vocabulary.eos_token  # allowed by llguidance, which may only have guessed it
        self._here = Standing(grammar.matcher.deep_copy())

    def consume(self, tokens: Sequence[int]) -> int:
        """Go on by emitted tokens; how many of them are legal, which is all unless `error` is set.

        What follows an end token is not looked at.
        """
        for count, token in enumerate(tokens):
            if self._here.matcher is None:
                return len(tokens)
            below = self._below(self._here, token)
            if below is None:
                self._here.matcher.compute_bitmask()
                self.error = self._here.matcher.get_error() or f"token {token} is outside the grammar"
                return count
            self._here = below
        return len(tokens)

    def standings(self, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]) -> dict[int, Standing]:
        """The places of a tree's legal paths, the root's 0 and node i's i + 1. Parents come before children."""
        found = {0: self._here if self._here.matcher is None else Standing(self._here.matcher.deep_copy())}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = found.get(parent + 1)
            if valid[node] and above is not None and above.matcher is not None:
                below = self._below(above, token)
                if below is not None:
                    found[node + 1] = below
        return found

    def close(self, mask: NDArray[np.uint32], standing: Standing) -> None:
        """Set the end tokens' bits of the `mask` [words] that llguidance has made for a standing.

        A matcher that has hit a limit allows nothing but the end, which `consume` finds out.
        """
        failed = standing.matcher.is_error()
        if failed:
            mask[:] = 0
        if failed or standing.matcher.is_accepting():
            for token, legal in ((self._foreign_end, False), *((end, True) for end in self._ends)):
                word, bit = divmod(token, 32)
                if word < len(mask):
                    mask[word] = mask[word] | np.uint32(1 << bit) if legal else mask[word] & ~np.uint32(1 << bit)

    def _below(self, above: Standing, token: int) -> Standing | None:
        """Where `token` leads, None if it is illegal."""
        if token in self._ends and above.matcher.is_accepting():
            return Standing(None)
        matcher = above.matcher.deep_copy()
        return Standing(matcher) if matcher.try_consume_tokens([token]) == 1 else None
