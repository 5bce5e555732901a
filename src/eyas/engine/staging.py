"""How many cache columns a round takes beyond what is committed."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import cast

import torch

from eyas.tree import TreeSpec
from eyas.tree.shared import SharedTree


def staging_columns(spec: TreeSpec | None) -> int:
    """Most columns that a round with such a tree stages.

    Those are root and nodes in the target's cache, guesses in the drafter's.
    """
    if spec is None:
        return 1
    if isinstance(spec, SharedTree):  # a new one each round
        return 1 + max(min(spec.budget, spec.per_row or spec.budget), spec.depth * spec.width)
    return _grown(cast(Hashable, spec))


@lru_cache(maxsize=256)
def _grown(hashable: Hashable) -> int:
    """By growing a tree of nothing."""
    spec = cast(TreeSpec, hashable)
    growth = spec.start(1, torch.device("cpu"))
    width, guesses = 1, 0
    for _ in range(spec.depth):
        tokens = torch.arange(width * growth.fanout).view(1, width, growth.fanout)
        frontier = growth.expand(torch.zeros(tokens.shape), tokens)
        if frontier is None:
            break
        width = frontier.tokens.shape[1]
        guesses += width
    return 1 + max(growth.tree().size, guesses)
