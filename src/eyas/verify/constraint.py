"""Constrained output: the grammar state of each sequence, and which tokens and tree nodes its grammar allows.

Following a grammar is host work on small objects. Copying a matcher takes about a microsecond, so every tree node gets
its own, and a branch can't affect the sequence. The grammar decides when an answer may end, and the model with which
token: end tokens are allowed where the grammar is satisfied, and are the only tokens allowed once it is complete.

Masks of an ambiguous grammar take longer with every token, until the grammar reaches one of llguidance's limits. If a
sequence's last mask took long, its next one is computed in the background: rounds continue without the sequence, and
nothing is drafted for it. One thread computes these masks and pauses as long as it worked, so all slow grammars
together take at most half a core from the others.

Shapes: B rows, N nodes, V the target's vocabulary, M masks, W 32-bit words of a mask. A node index counts the root as 0
and node i as i + 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.errors import RequestError
from eyas.runtime import to_device
from eyas.tree import DraftTree, NodeLogits
from eyas.types import Request, SamplingParams
from eyas.verify.grammar import Grammar, compile_grammar, executor, first_lines, slow_mask_executor

Mask = NDArray[np.uint32]
"""[W]: token t is legal if bit t % 32 of word t // 32 is set."""
_SLOW_SECONDS = 0.01
"""Seconds above which the masks of a round count as slow."""
_FAST_SECONDS = 0.001
"""Seconds below which a mask is fast again: a tree needs one for each of its nodes."""
_REST_RATIO = 1.0
"""How long the thread for slow masks pauses after each, relative to the time that it took."""
_MOST_FORCED = 256
"""Bytes of forced text that are divided into tokens in a round, which takes 0.1 to 0.2 milliseconds; the 60,000 that a
hostile grammar forces take 18 to 100. With 64, 1,024 or all, a forced text of 478 tokens takes as many passes."""


def grammar_of(request: Request, tokenizer: Any, eos_ids: Collection[int], vocab_size: int) -> Grammar | None:
    """A request's grammar, compiled or from the cache; None if its answer is unconstrained.

    Raises RequestError if the grammar can't be compiled or the answer couldn't end.
    """
    if request.grammar is None:
        return None
    grammar = compile_grammar(tokenizer, request.grammar)
    end_tokens(grammar, request.params, eos_ids, vocab_size)
    return grammar


def end_tokens(grammar: Grammar, params: SamplingParams, eos_ids: Collection[int], vocab_size: int) -> frozenset[int]:
    """The tokens that end a constrained answer: the target's end tokens, and stop tokens without text.

    Raises RequestError if there are none.
    """
    if params.ignore_eos:
        raise RequestError("ignore_eos can't be combined with a grammar: once it is complete, only an end may follow")
    vocabulary = grammar.vocabulary
    ids = {*eos_ids, *(token for token in params.stop_token_ids if vocabulary.is_special_token(token))}
    ids = {token for token in ids if 0 <= token < min(vocab_size, vocabulary.vocab_size)}
    if not ids:
        raise RequestError("a grammar needs an end token to finish with, but the target has none: give stop_token_ids")
    return frozenset(ids)


@dataclass(frozen=True)
class GrammarState:
    """The state of a grammar after some legal tokens."""

    matcher: Any  # llguidance.LLMatcher; None after an end token: anything may follow


class Constraint:
    """Tracks one sequence through its grammar. `end_ids` are the tokens that end an answer without being part of it."""

    def __init__(self, grammar: Grammar, end_ids: Collection[int]) -> None:
        self.words = (grammar.vocabulary.vocab_size + 31) // 32
        """W for the tokenizer's vocabulary, whose size may differ from the target's."""
        self.error: str | None = None
        """Why the sequence can't continue: the grammar has reached one of its limits."""
        self.root_mask: Mask | None = None
        """The mask at `state`, once it has been computed."""
        self.slow = False
        """Whether the last mask took long."""
        self.pending_mask: Future[tuple[Mask, float]] | None = None
        """The mask at `state` and the seconds it took, while it is computed in the background."""
        self.state = GrammarState(grammar.matcher.deep_copy())
        """The state after all emitted tokens."""
        self._end_ids = frozenset(end_ids)
        self._vocabulary = grammar.vocabulary
        self._guessed_end = grammar.vocabulary.eos_token  # allowed by llguidance, which may have guessed it wrongly

    def consume(self, tokens: Sequence[int]) -> int:
        """Advance by emitted tokens; returns how many of them are legal: all, unless `error` is set.

        Tokens after an end token are not examined.
        """
        self.root_mask = self.pending_mask = None
        for count, token in enumerate(tokens):
            if self.state.matcher is None:
                break
            after = self._after(self.state, token)
            if after is None:
                self.error = self._reason(token)
                return count
            self.state = after
        if self.slow and self.state.matcher is not None:
            self.pending_mask = _mask_executor().submit(self.compute_in_background, self.state.matcher.deep_copy())
        return len(tokens)

    def forced(self) -> list[int]:
        """The tokens that write the text which must come next, such as the key of a JSON object.

        Other tokens may write the same text, but a model rarely chooses them (jump-forward decoding,
        https://www.lmsys.org/blog/2024-02-05-compressed-fsm).
        """
        matcher = self.state.matcher
        if matcher is None:
            return []
        text = matcher.compute_ff_bytes()
        tokens: list[int]
        if len(text) <= _MOST_FORCED:
            tokens = matcher.compute_ff_tokens()
        else:
            tokens, _ = self._vocabulary.tokenize_partial(text[:_MOST_FORCED])
        return tokens

    @property
    def ready(self) -> bool:
        """Whether a round needn't wait for the mask at `state`."""
        return self.pending_mask is None or self.pending_mask.done()

    def compute_in_background(self, matcher: Any) -> tuple[Mask, float]:
        """The mask of `matcher` and the seconds it took; runs on any thread; nothing else may use `matcher`.

        If it took long, the thread pauses before it returns, to leave time for other sequences.
        """
        began = time.perf_counter()
        made = np.zeros((1, self.words), dtype=np.uint32)
        slow_mask_executor().unsafe_compute_mask_ptr([(matcher, 0)], made.ctypes.data, made.strides[0], 1)
        self.set_end_bits(made[0], matcher)
        seconds = time.perf_counter() - began
        if seconds > _FAST_SECONDS:
            time.sleep(_REST_RATIO * seconds)
        return made[0], seconds

    def known_mask(self) -> Mask | None:
        """The mask at `state` if it is known; waits for one that is being computed in the background."""
        if self.pending_mask is not None:
            self.root_mask, seconds = self.pending_mask.result()
            self.slow = seconds > _FAST_SECONDS
            self.pending_mask = None
        return self.root_mask

    def reach(self, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]) -> dict[int, GrammarState]:
        """Node index -> state, for the tree nodes reached by legal tokens only. Parents precede children."""
        found = {0: self.state}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = found.get(parent + 1)
            if valid[node] and above is not None and above.matcher is not None:
                after = self._after(above, token)
                if after is not None:
                    found[node + 1] = after
        return found

    def set_end_bits(self, mask: Mask, matcher: Any) -> None:
        """Correct the bits of end tokens in a mask that llguidance has computed for `matcher`.

        A matcher that has reached a limit allows only end tokens; `consume` then reports the limit.
        """
        failed = matcher.is_error()
        if failed:
            mask[:] = 0
        if failed or matcher.is_accepting():
            for token, legal in ((self._guessed_end, False), *((end, True) for end in self._end_ids)):
                word, bit = divmod(token, 32)
                mask[word] = mask[word] | np.uint32(1 << bit) if legal else mask[word] & ~np.uint32(1 << bit)

    def _reason(self, token: int) -> str:
        """Why the sequence can't continue with `token`."""
        self.state.matcher.compute_bitmask()
        found = first_lines(self.state.matcher.get_error()) or f"token {token} is outside it"
        return f"the grammar can't be followed any further: {found}"

    def _after(self, state: GrammarState, token: int) -> GrammarState | None:
        """The state after one more token; None if it is illegal."""
        if token in self._end_ids and state.matcher.is_accepting():
            return GrammarState(None)
        matcher = state.matcher.deep_copy()
        return GrammarState(matcher) if matcher.try_consume_tokens([token]) == 1 else None


@lru_cache(maxsize=1)
def _mask_executor() -> ThreadPoolExecutor:
    """The background thread that computes slow masks, one at a time."""
    return ThreadPoolExecutor(1, "grammar-masks")


def await_any(constraints: Sequence[Constraint | None], seconds: float) -> None:
    """Wait until one of the masks in progress is ready, for at most `seconds`."""
    wait([one.pending_mask for one in constraints if one and one.pending_mask], seconds, return_when=FIRST_COMPLETED)


class LegalTree:
    """A batch of draft trees pruned by their rows' constraints (None = an unconstrained row).

    Creating it copies the trees to the host: the one sync that constrained rows add. The masks are computed in
    `restrict`; on an accelerator, that is while the target's pass runs.
    """

    def __init__(self, constraints: Sequence[Constraint | None], tree: DraftTree, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        table = torch.stack((tree.tokens, tree.parents, tree.acceptable.long()), dim=1).tolist()
        keep = [acceptable for _, _, acceptable in table]
        self._nodes: list[_Node] = []
        for row, (constraint, (tokens, parents, acceptable)) in enumerate(zip(constraints, table, strict=True)):
            if constraint is not None:
                states = constraint.reach(tokens, parents, acceptable)
                keep[row] = [node + 1 in states for node in range(tree.size)]
                self._nodes += [
                    _Node(row, node, constraint, state.matcher)
                    for node, state in states.items()
                    if state.matcher is not None
                ]
        pruned = to_device(keep, tree.tokens.device, torch.bool).reshape(tree.valid.shape)
        counted = sum(map(sum, keep))
        if tree.scratch is not None:  # never emitted, so grammars don't apply
            scratch = tree.valid & tree.scratch
            pruned = pruned | scratch
            counted += int(scratch.sum())
        self.tree = replace(tree, valid=pruned, counted=counted)
        """The trees without illegal nodes, which the target needn't verify."""

    def restrict(self, logits: NodeLogits) -> LegalLogits:
        """The target's logits, with illegal tokens ruled out when they are read."""
        rows = logits.index.shape[0]
        device = logits.index.device
        legal = _legal_tokens(self._nodes, self.tree.size, rows, self._vocab_size, device)
        return LegalLogits(logits.rows, logits.index, legal)


@dataclass(frozen=True)
class LegalTokens:
    """Masks of legal tokens, and which mask applies at each node."""

    words: Tensor  # [M, W] int32
    index: Tensor  # [B, 1 + N] into `words`, by node index
    vocab_size: int

    def at(self, nodes: Tensor) -> Tensor:
        """[B, V] bool: the tokens legal at node indexes `nodes` [B]; an index past the end reads the last node."""
        nodes = nodes.clamp(max=self.index.shape[1] - 1)
        words = self.words[self.index.gather(1, nodes.unsqueeze(1)).squeeze(1)]  # [B, W]
        bits = torch.arange(32, dtype=torch.int32, device=words.device)
        return ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, : self.vocab_size].to(torch.bool)


@dataclass(frozen=True)
class LegalLogits(NodeLogits):
    """The target's logits, -inf for illegal tokens."""

    legal: LegalTokens

    def best(self) -> Tensor:
        rows, nodes = self.index.shape
        at = torch.arange(nodes, device=self.index.device).unsqueeze(1).expand(nodes, rows)
        return torch.stack([self.at(node).argmax(dim=-1) for node in at], dim=1)

    def at(self, nodes: Tensor) -> Tensor:
        return super().at(nodes).masked_fill(~self.legal.at(nodes), -math.inf)


def legal_roots(constraints: Sequence[Constraint | None], vocab_size: int, device: torch.device) -> LegalTokens:
    """The legal next tokens of each row. The masks are kept for the roots of the rows' trees."""
    nodes = [
        _Node(row, 0, constraint, constraint.state.matcher)
        for row, constraint in enumerate(constraints)
        if constraint is not None and constraint.state.matcher is not None
    ]
    return _legal_tokens(nodes, 0, len(constraints), vocab_size, device)


@dataclass(frozen=True)
class _Node:
    """A node of a constrained row's tree."""

    row: int
    index: int
    constraint: Constraint
    matcher: Any


def _legal_tokens(nodes: Sequence[_Node], size: int, rows: int, vocab_size: int, device: torch.device) -> LegalTokens:
    """The masks of `nodes`, for `rows` trees of `size` nodes; everything is legal at all other nodes."""
    width = (vocab_size + 31) // 32
    table = np.zeros((1 + len(nodes), width), dtype=np.uint32)
    table[0] = 0xFFFFFFFF  # anything is legal
    index = np.zeros((rows, 1 + size), dtype=np.int64)
    for k, (node, mask) in enumerate(zip(nodes, _masks(nodes), strict=True), 1):
        table[k, : len(mask)] = mask[:width]
        index[node.row, node.index] = k
    words = torch.from_numpy(table.view(np.int32)).to(device)
    return LegalTokens(words, torch.from_numpy(index).to(device), vocab_size)


def _masks(nodes: Sequence[_Node]) -> list[Mask]:
    """The mask at each node, computed in llguidance's threads; a root's is computed once."""
    masks = [node.constraint.known_mask() if node.index == 0 else None for node in nodes]
    missing = [k for k, mask in enumerate(masks) if mask is None]
    if missing:
        made = np.zeros((len(missing), nodes[0].constraint.words), dtype=np.uint32)
        # copies, because computing a mask that reaches a limit breaks its matcher
        jobs = [(nodes[k].matcher.deep_copy(), row) for row, k in enumerate(missing)]
        began = time.perf_counter()
        executor().unsafe_compute_mask_ptr(jobs, made.ctypes.data, made.strides[0], len(jobs))
        slow = time.perf_counter() - began > _SLOW_SECONDS  # it isn't known which one was
        for (matcher, row), k in zip(jobs, missing, strict=True):
            node = nodes[k]
            node.constraint.set_end_bits(made[row], matcher)
            node.constraint.slow = slow
            masks[k] = made[row]
            if node.index == 0:
                node.constraint.root_mask = made[row]
    return [mask for mask in masks if mask is not None]
