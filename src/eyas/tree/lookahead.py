"""Lookahead's trees (arXiv 2402.02057): a window of guesses as scratch nodes, and known n-grams as candidates.

The window's first level is a chain below the root, which is its column 0. In each further level, column j is a child
of column j in the level above. So a node sees the first level up to its own column, and its own column of the levels
between, and its position is its depth. This is the attention of the published method, as a tree.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from torch.nn.utils.rnn import pad_sequence

from eyas.errors import UsageError
from eyas.tree.bounds import check_sizes
from eyas.tree.draft_tree import DraftTree, NetworkDraft, TreeSpec


@dataclass(frozen=True)
class LookaheadTree(TreeSpec):
    """A window of `ngram - 1` levels of `window` columns, and at most `guesses` n-grams, `ngram - 1` nodes each.

    These are the paper's W, N and G. It isn't grown level by level: the method's drafter makes whole trees.
    """

    window: int
    ngram: int
    guesses: int
    depth: int = field(init=False, repr=False, compare=False)
    method = "lookahead"

    def __post_init__(self) -> None:
        check_sizes("lookahead", window=self.window, ngram=self.ngram, guesses=self.guesses)
        object.__setattr__(self, "depth", self.ngram - 1)

    @property
    def max_fanout(self) -> int:
        return self.guesses

    @property
    def first_guesses(self) -> int:
        """Length of the first level while it is the only one: it loses a column with each further level."""
        return self.window + self.ngram - 3

    @property
    def max_nodes(self) -> int:
        # with all levels, or with one fewer, each a column longer
        filled = max((self.ngram - 1) * self.window, (self.ngram - 2) * (self.window + 1)) - 1
        return filled + self.guesses * self.depth

    def start(self, *_: object) -> NoReturn:
        raise UsageError("lookahead:W,N,G trees are made by `method=lookahead` only: give another tree")


class Branches(NamedTuple):
    """The contents of one row's tree."""

    levels: Sequence[Sequence[int]]
    """Tokens of the window's levels; the first starts at column 1, because the root is column 0."""
    ngrams: Iterable[Sequence[int]]
    """Continuations of the root that may be accepted; common prefixes share their nodes."""


def lookahead_trees(branches: Sequence[Branches | None], device: torch.device) -> DraftTree:
    """The trees of all rows [B]: a row's scratch nodes, level by level, then its candidates; None = no nodes."""
    rows = [_RowNodes() if branch is None else _row(branch) for branch in branches]
    sizes = [len(row[0]) for row in rows]
    if not any(sizes):
        return DraftTree.empty(len(rows), device)
    tokens, parents, depths = (
        pad_sequence([torch.tensor(row[part], dtype=torch.int64) for row in rows], batch_first=True, padding_value=pad)
        for part, pad in ((0, 0), (1, -1), (2, 0))
    )
    valid = torch.arange(tokens.shape[1]) < torch.tensor(sizes).unsqueeze(1)
    return DraftTree(
        tokens=tokens.to(device),
        parents=parents.to(device),
        logprob=torch.zeros(tokens.shape, device=device),  # the probability of n-grams isn't known
        valid=valid.to(device),
        max_depth=int(depths.max()),
        counted=sum(sizes),
        scratch=(depths == 0).to(device),
        network=NetworkDraft(levels=1),  # all of it at once, so that its time counts
    )


class _RowNodes(NamedTuple):
    """The nodes of one row, as columns."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    depths: Sequence[int] = ()
    """0 for scratch nodes."""


def _row(branches: Branches) -> _RowNodes:
    first, *further = branches.levels
    tokens = [*first]
    parents = [*range(-1, len(first) - 1)]
    above = [-1, *range(len(first))]  # the nodes of the level above by column, starting with the root
    for level in further:
        parents += above[: len(level)]
        above = [*range(len(tokens), len(tokens) + len(level))]
        tokens += level
    depths = [0] * len(tokens)
    below: dict[tuple[int, int], int] = {}  # (parent, token) -> candidate
    for ngram in branches.ngrams:
        parent = -1
        for depth, token in enumerate(ngram, 1):
            node = below.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
            parent = node
    return _RowNodes(tokens, parents, depths)
