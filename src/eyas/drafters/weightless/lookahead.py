"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target itself guesses ahead, in the pass that verifies.

With the last token, a pass runs a window of guesses: N - 1 levels of W columns, where each level is the target's
prediction for the level before it in the previous pass (Jacobi iteration). The columns hold n-grams that the target
finds likely. They go into a pool, and n-grams that begin with the last token are verified in later passes. The method
needs neither weights nor repeated text, but a pass runs about a hundred more tokens: it pays where these are nearly
free.

At the start of an answer there is one level of random prompt tokens, and each pass adds a level, as in the paper's
code. After rounds without drafts the window is out of date, which only makes its guesses worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import cast

import torch

from eyas.drafters.history import History, HistoryDrafter, TokenPairs
from eyas.errors import UsageError
from eyas.targets import Target
from eyas.tree import DraftTree, NodeLogits, TreeSpec
from eyas.tree.lookahead import Branches, LookaheadTree, lookahead_trees
from eyas.types import NO_OWNER, Owner
from eyas.verify import Coupling


@dataclass
class LookaheadWindow:
    """The window of one sequence, and its pool of n-grams."""

    spec: LookaheadTree
    levels: list[list[int]]
    """Tokens by level; the first level begins at column 1, since its column 0 is the last token."""
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)
    """Token -> the n-grams that may follow it, oldest first."""

    @property
    def filled(self) -> bool:
        """Whether the window has all its levels."""
        return len(self.levels) == self.spec.depth

    @property
    def awaited(self) -> range:
        """The tree nodes of the last level; their successors form the next level."""
        stop = sum(map(len, self.levels))
        # while a level is added the others stay; all of them lose the column that the next root takes
        skipped = 0 if self.filled or len(self.levels) == 1 else 1
        return range(stop - len(self.levels[-1]) + skipped, stop)

    def advance(self, root: int, successors: list[int]) -> None:
        """Advance by one level: `successors` is what the target predicts after `awaited` in a pass from `root`."""
        if not self.filled:
            self.levels = [*(level[1:] for level in self.levels), successors]
            return
        for token, *ngram in zip([root, *self.levels[0]], *self.levels[1:], successors, strict=True):
            self._keep(token, tuple(ngram))
        self.levels = [self.levels[1][1:], *self.levels[2:], successors]

    def _keep(self, token: int, ngram: tuple[int, ...]) -> None:
        """Add an n-gram to the pool; if a token's pool is full, the n-gram found longest ago is dropped."""
        known = self.pool.setdefault(token, {})
        known.pop(ngram, None)
        known[ngram] = None
        if len(known) > self.spec.guesses:
            del known[next(iter(known))]


def first_guesses(prompt: Sequence[int], count: int) -> list[int]:
    """`count` random tokens of a prompt, the same ones each time."""
    return Random(str(list(prompt))).choices(prompt, k=count)


class LookaheadHistory(History):
    """A sequence, its prompt, and its window."""

    def __init__(self, prompt: Sequence[int] = (), owner: Owner = NO_OWNER) -> None:
        super().__init__(prompt, owner)
        self.prompt = prompt
        self.window: LookaheadWindow | None = None
        """None = nothing has been drafted yet."""


class LookaheadDrafter(HistoryDrafter):
    """Proposes the n-grams found by its window, and lets the target advance the window."""

    pairs: TokenPairs[LookaheadHistory]

    def __init__(
        self, device: torch.device, vocab_size: int, window: int = 15, ngram: int = 5, guesses: int = 15
    ) -> None:
        """Set W, N and G of the default tree, by default the paper's for 7B models. Raises UsageError."""
        LookaheadTree(window, ngram, guesses)
        self.max_fanout = vocab_size
        self.fixed_tree = f"lookahead:{window},{ngram},{guesses}"
        super().__init__(TokenPairs(LookaheadHistory), device)

    def draft(
        self,
        rows: range,
        spec: TreeSpec,
        coupling: Coupling,  # noqa: ARG002
        drafting: Sequence[bool] | None = None,
    ) -> DraftTree:
        if spec.method != LookaheadTree.method:
            raise UsageError("the method lookahead only drafts trees lookahead:W,N,G: give such a tree, or none")
        wanted = [True] * len(rows) if drafting is None else drafting
        tree = cast(LookaheadTree, spec)
        branches = [self._branches(slot, tree) if want else None for slot, want in zip(rows, wanted, strict=True)]
        return lookahead_trees(branches, self._device)

    def _branches(self, slot: int, spec: LookaheadTree) -> Branches:
        history = self.pairs[slot]
        if history.window is None or history.window.spec != spec:
            history.window = LookaheadWindow(spec, [first_guesses(history.prompt, spec.first_guesses)])
        ngrams: Iterable[tuple[int, ...]] = history.window.pool.get(history.tokens[-1], ())
        return Branches(history.window.levels, ngrams)

    def verified(self, rows: range, tree: DraftTree, logits: NodeLogits, drafting: Sequence[bool]) -> None:  # noqa: ARG002
        windows = [
            (row, self.pairs[slot].tokens[-1], window)
            for row, (slot, drafted) in enumerate(zip(rows, drafting, strict=True))
            if drafted and (window := self.pairs[slot].window) is not None
        ]
        at = [(row, 1 + node) for row, _, window in windows for node in window.awaited]
        row_index, nodes = torch.tensor(at, device=logits.index.device).unbind(1)
        best = iter(logits.rows[logits.index[row_index, nodes]].max(dim=1).indices.tolist())
        for _, last, window in windows:
            window.advance(last, [next(best) for _ in window.awaited])


def make(target: Target) -> LookaheadDrafter:
    """Lookahead decoding with W = 15, N = 5, G = 15."""
    return LookaheadDrafter(target.device, target.vocab_size)
