"""Where one sequence stands in its grammar, and which nodes of a draft tree the grammar allows.

All of it is host work on small objects: a matcher is copied in about a microsecond, so every place of a tree gets its
own, and what a branch does to its copy can't harm the sequence.

Ends: a grammar says when an answer may end, the model says with which token. The end tokens are allowed where the
grammar is satisfied, and nothing else is once it has nothing to add.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.errors import RequestError
from eyas.tree import DraftTree, NodeLogits
from eyas.types import Request, SamplingParams
from eyas.verify.grammar import Grammar, compile_grammar, executor, first_lines

Mask = NDArray[np.uint32]
"""[words]: token t is legal if bit t % 32 of word t // 32 is set."""


@dataclass(frozen=True)
class GrammarState:
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
        self.here = GrammarState(grammar.matcher.deep_copy())

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

    def standings(
        self, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]
    ) -> dict[int, GrammarState]:
        """The places of a tree's legal paths, the root's 0 and node i's i + 1. Parents come before children."""
        found = {0: self.here}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = found.get(parent + 1)
            if valid[node] and above is not None and above.matcher is not None:
                below = self._below(above, token)
                if below is not None:
                    found[node + 1] = below
        return found

    def close(self, mask: Mask, standing: GrammarState) -> None:
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

    def _below(self, above: GrammarState, token: int) -> GrammarState | None:
        """Where `token` leads, None if it is illegal."""
        if token in self._ends and above.matcher.is_accepting():
            return GrammarState(None)
        matcher = above.matcher.deep_copy()
        return GrammarState(matcher) if matcher.try_consume_tokens([token]) == 1 else None


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


# Which tokens are legal at the places of a batch of draft trees.
#
# Shapes: B rows, N nodes, V the target's vocabulary, M masks, W 32-bit words of a mask. Place 0 is the root, place i +
# 1 node i. Token t is bit t % 32 of word t // 32.


Place = tuple[int, int, Constraint, GrammarState]
"""Row, place, and what stands there."""


class LegalTree:
    """A batch of trees as their rows' constraints see it (None: a row without one).

    Making it moves the trees to the host: the one sync that constrained rows add. The masks are made when the logits
    are restricted, which on an accelerator is while the target's pass runs.
    """

    def __init__(self, constraints: Sequence[Constraint | None], tree: DraftTree, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        table = torch.stack((tree.tokens, tree.parents, tree.valid.long()), dim=1).tolist()
        keep = [valid for _, _, valid in table]
        self._places: list[Place] = []
        for row, (constraint, (tokens, parents, valid)) in enumerate(zip(constraints, table, strict=True)):
            if constraint is not None:
                found = constraint.standings(tokens, parents, valid)
                keep[row] = [node + 1 in found for node in range(tree.size)]
                self._places += [(row, place, constraint, s) for place, s in found.items() if s.matcher is not None]
        pruned = torch.tensor(keep, dtype=torch.bool, device=tree.tokens.device).reshape(tree.valid.shape)
        self.tree = replace(tree, valid=pruned, counted=sum(map(sum, keep)))
        """The trees without their illegal nodes: the target needn't see those."""

    def restrict(self, logits: NodeLogits) -> LegalLogits:
        """The target's logits, what is illegal ruled out where it is read."""
        rows, device = logits.index.shape[0], logits.index.device
        legal = _legal_tokens(self._places, self.tree.size, rows, self._vocab_size, device)
        return LegalLogits(logits.rows, logits.index, legal)


@dataclass(frozen=True)
class LegalTokens:
    """Masks, and which one holds where."""

    words: Tensor  # [M, W] int32
    index: Tensor  # [B, 1 + N] the mask of each place
    vocab_size: int

    def at(self, places: Tensor) -> Tensor:
        """[B, V] bool: the tokens that are legal at `places` [B]; a place past the last one is the last one."""
        places = places.clamp(max=self.index.shape[1] - 1)
        words = self.words[self.index.gather(1, places.unsqueeze(1)).squeeze(1)]  # [B, W]
        bits = torch.arange(32, dtype=torch.int32, device=words.device)
        return ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, : self.vocab_size].to(torch.bool)


@dataclass(frozen=True)
class LegalLogits(NodeLogits):
    """Logits of which only legal tokens' are finite."""

    legal: LegalTokens

    def best(self) -> Tensor:
        rows, places = self.index.shape
        at = torch.arange(places, device=self.index.device).unsqueeze(1).expand(places, rows)
        return torch.stack([self.at(place).argmax(dim=-1) for place in at], dim=1)

    def at(self, places: Tensor) -> Tensor:
        return super().at(places).masked_fill(~self.legal.at(places), -math.inf)


def legal_roots(constraints: Sequence[Constraint | None], vocab_size: int, device: torch.device) -> LegalTokens:
    """What is legal as the next token of each row; the masks are kept for the row's tree."""
    places = [(row, 0, c, c.here) for row, c in enumerate(constraints) if c is not None and c.here.matcher is not None]
    return _legal_tokens(places, 0, len(constraints), vocab_size, device)


def _legal_tokens(places: Sequence[Place], nodes: int, rows: int, vocab_size: int, device: torch.device) -> LegalTokens:
    width = (vocab_size + 31) // 32
    table = np.zeros((1 + len(places), width), dtype=np.uint32)
    table[0] = 0xFFFFFFFF  # for places where anything goes
    index = np.zeros((rows, 1 + nodes), dtype=np.int64)
    for k, ((row, place, _, _), mask) in enumerate(zip(places, _masks(places), strict=True), 1):
        table[k, : len(mask)] = mask[:width]
        index[row, place] = k
    words = torch.from_numpy(table.view(np.int32)).to(device)
    return LegalTokens(words, torch.from_numpy(index).to(device), vocab_size)


def _masks(places: Sequence[Place]) -> list[Mask]:
    """The masks of places, in llguidance's threads; those of roots are made once."""
    masks = [constraint.root_mask if place == 0 else None for _, place, constraint, _ in places]
    missing = [k for k, mask in enumerate(masks) if mask is None]
    if missing:
        made = np.zeros((len(missing), places[0][2].words), dtype=np.uint32)
        # copies: a mask that runs into a limit breaks its matcher
        jobs = [(places[k][3].matcher.deep_copy(), row) for row, k in enumerate(missing)]
        executor().unsafe_compute_mask_ptr(jobs, made.ctypes.data, made.strides[0], len(jobs))
        for (matcher, row), k in zip(jobs, missing, strict=True):
            _, place, constraint, _ = places[k]
            constraint.close(made[row], GrammarState(matcher))
            masks[k] = made[row]
            if place == 0:
                constraint.root_mask = made[row]
    return [mask for mask in masks if mask is not None]
