"""How a drafter and a tree shape work together, level by level.

The drafter asks the growth how many children each frontier node should offer, hands them over, and gets back the
nodes to run through its layers next. Shapes: B rows, W frontier nodes, K children offered by each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.tree.draft_tree import DraftTree


class Frontier(NamedTuple):
    """The nodes whose own children are wanted."""

    tokens: Tensor  # [B, W]
    parents: Tensor  # [B, W] index into the previous frontier


class Growth(Protocol):
    """A tree being grown; lives for one draft."""

    @property
    def fanout(self) -> int:
        """K: children wanted of every frontier node at this level."""

    def expand(self, logprob: Tensor, tokens: Tensor) -> Frontier | None:
        """Take the K best children [B, W, K] of each frontier node, best first; None when the tree is full-grown."""

    def tree(self) -> DraftTree:
        """The finished tree."""


class TreeSpec(Protocol):
    """A tree shape; immutable, shared by all drafts."""

    @property
    def depth(self) -> int:
        """Levels below the root = drafter forwards in a round."""

    @property
    def max_fanout(self) -> int:
        """The most children any node is asked for; a draft vocabulary must be at least this large."""

    def start(self, batch: int, device: torch.device, live: Sequence[bool] | None = None) -> Growth:
        """Begin a batch of trees that are only a root. Rows that aren't `live` get no nodes; None = all are."""
