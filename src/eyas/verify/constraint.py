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
from eyas.types import Request, SamplingParams
from eyas.verify.grammar import Grammar, compile_grammar, first_lines

Mask = NDArray[np.uint32]
"""[words]: token t is legal if bit t % 32 of word t // 32 is set."""


@dataclass(frozen=True)
class Standing:
    """A place some legal path reaches."""

    matcher: Any  # llguidance.LLMatcher; None behind an end token, where nothing matters any more


class Constraint:
    """One sequence's walk through a grammar. `ends` are the tokens that end an answer without being part of it."""

    def __init__(self, grammar: Grammar, ends: Collection[int]) -> None:
        self.words = (grammar.vocabulary.vocab_size + 31) // 32
        """Length of a mask over the tokenizer's vocabulary."""
        self.error: str | None = None
        """Why the sequence can't go on: the grammar has run into a limit."""
        self.root_mask: Mask | None = None
        """The mask of where it stands, if somebody has made it already."""
        self._ends = frozenset(ends)
        self._foreign_end = grammar.vocabulary.eos_token  # allowed by llguidance, which may only have guessed it
        self.here = Standing(grammar.matcher.deep_copy())

    def consume(self, tokens: Sequence[int]) -> int:
        """Go on by emitted tokens; how many of them are legal, which is all unless `error` is set.

        What follows an end token is not looked at.
        """
        self.root_mask = None
        for count, token in enumerate(tokens):
            if self.here.matcher is None:
                break
            below = self._below(self.here, token)
            if below is None:
                self.error = self._reason(token)
                return count
            self.here = below
        return len(tokens)

    def standings(self, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]) -> dict[int, Standing]:
        """The places of a tree's legal paths, the root's 0 and node i's i + 1. Parents come before children."""
        found = {0: self.here}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = found.get(parent + 1)
            if valid[node] and above is not None and above.matcher is not None:
                below = self._below(above, token)
                if below is not None:
                    found[node + 1] = below
        return found

    def close(self, mask: Mask, standing: Standing) -> None:
        """Set the end tokens' bits of the `mask` that llguidance has made for a standing.

        A matcher that has hit a limit allows nothing but the end, which `consume` finds out.
        """
        failed = standing.matcher.is_error()
        if failed:
            mask[:] = 0
        if failed or standing.matcher.is_accepting():
            for token, legal in ((self._foreign_end, False), *((end, True) for end in self._ends)):
                word, bit = divmod(token, 32)
                mask[word] = mask[word] | np.uint32(1 << bit) if legal else mask[word] & ~np.uint32(1 << bit)

    def _reason(self, token: int) -> str:
        """Why it can't go on by `token`."""
        self.here.matcher.compute_bitmask()
        found = first_lines(self.here.matcher.get_error()) or f"token {token} is outside it"
        return f"the grammar can't be followed any further: {found}"

    def _below(self, above: Standing, token: int) -> Standing | None:
        """Where `token` leads, None if it is illegal."""
        if token in self._ends and above.matcher.is_accepting():
            return Standing(None)
        matcher = above.matcher.deep_copy()
        return Standing(matcher) if matcher.try_consume_tokens([token]) == 1 else None


def grammar_of(request: Request, tokenizer: Any, eos_ids: Collection[int], vocab_size: int) -> Grammar | None:
    """What a request's answer must look like, compiled (once: it is remembered); None if it may be anything.

    RequestError if it can't be followed.
    """
    if request.grammar is None:
        return None
    grammar = compile_grammar(tokenizer, request.grammar)
    end_tokens(grammar, request.params, eos_ids, vocab_size)
    return grammar


def end_tokens(grammar: Grammar, params: SamplingParams, eos_ids: Collection[int], vocab_size: int) -> frozenset[int]:
    """With which tokens an answer in a grammar ends: the target's end tokens, and stop tokens that are no text.

    RequestError if there are none.
    """
    if params.ignore_eos:
        raise RequestError("ignore_eos can't be kept with a grammar: once it is complete only an end may follow")
    vocabulary = grammar.vocabulary
    ends = {*eos_ids, *(token for token in params.stop_token_ids if vocabulary.is_special_token(token))}
    ends = {token for token in ends if 0 <= token < min(vocab_size, vocabulary.vocab_size)}
    if not ends:
        raise RequestError("a grammar needs an end token to finish with: the target has none, give stop_token_ids")
    return frozenset(ends)
