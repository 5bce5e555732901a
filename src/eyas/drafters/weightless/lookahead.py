"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target itself guesses ahead, in the pass that verifies.

Beside the last token a pass runs a window of guesses: N - 1 levels of W columns, each level what the target said of the
one before it a pass earlier (a Jacobi iteration). Down the columns stand n-grams that the target found likely. They go
into a pool, and those that begin with the last token are verified in later passes. It needs no weights, and nothing has
to be repeated in the text, but a pass runs a hundred tokens more: it pays where those are nearly free.

At the start of an answer there is one level, of random tokens of the prompt, and each pass adds one, as in the paper's
code. After rounds without drafts the window lies behind; that makes its guesses worse, and nothing else.
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
from eyas.verify import Coupling


@dataclass
class LookaheadWindow:
    """The window of one sequence, and the n-grams that came out of it."""

    spec: LookaheadTree
    levels: list[list[int]]
    """Tokens by level; the first begins at column 1, for its column 0 is the last token."""
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)
    """Token -> the n-grams that may follow it, the one found last at the end."""

    @property
    def filled(self) -> bool:
        """Whether it has all its levels."""
        return len(self.levels) == self.spec.depth

    @property
    def awaited(self) -> range:
        """The tree's nodes whose successors are the next level: those of the last level."""
        stop = sum(map(len, self.levels))
        # while a level is added the others stay, and the column that the next root takes is dropped from all
        skipped = 0 if self.filled or len(self.levels) == 1 else 1
        return range(stop - len(self.levels[-1]) + skipped, stop)

    def advance(self, root: int, successors: list[int]) -> None:
        """Move up, given what the target says follows the `awaited` nodes of a pass that began with `root`."""
        if not self.filled:
            self.levels = [*(level[1:] for level in self.levels), successors]
            return
        for token, *ngram in zip([root, *self.levels[0]], *self.levels[1:], successors, strict=True):
            self._keep(token, tuple(ngram))
        self.levels = [self.levels[1][1:], *self.levels[2:], successors]

    def _keep(self, token: int, ngram: tuple[int, ...]) -> None:
        """Add to the pool; where it is full for a token, the n-gram that was found longest ago goes."""
        known = self.pool.setdefault(token, {})
        known.pop(ngram, None)
        known[ngram] = None
        if len(known) > self.spec.guesses:
            del known[next(iter(known))]


def first_guesses(prompt: Sequence[int], count: int) -> list[int]:
    """Random tokens of a prompt, the same ones each time."""
    return Random(str(list(prompt))).choices(prompt, k=count)


class LookaheadHistory(History):
    """A sequence, its prompt, and its window."""

    def __init__(self, prompt: Sequence[int] = (), owner: str = "") -> None:
        super().__init__(prompt, owner)
        self.prompt = prompt
        self.window: LookaheadWindow | None = None
        """None = nothing was drafted yet."""


class LookaheadDrafter(HistoryDrafter):
    """Proposes the n-grams that its window found, and has the target move the window on."""

    pairs: TokenPairs[LookaheadHistory]

    def __init__(
        self, device: torch.device, vocab_size: int, window: int = 15, ngram: int = 5, guesses: int = 15
    ) -> None:
        """W, N and G are those of its default tree: the paper's for models of 7B. Raises UsageError."""
        LookaheadTree(window, ngram, guesses)
        self.max_fanout = vocab_size
        self.default_tree = f"lookahead:{window},{ngram},{guesses}"
        super().__init__(TokenPairs(LookaheadHistory), device)

    def draft(
        self,
        rows: range,
        spec: TreeSpec,
        coupling: Coupling,  # noqa: ARG002
        drafting: Sequence[bool] | None = None,
    ) -> DraftTree:
        if spec.method != LookaheadTree.method:
            raise UsageError("the method lookahead drafts trees lookahead:W,N,G only: give such a tree, or none")
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
