"""Which tokens are legal at the places of a batch of draft trees.

Shapes: B rows, N nodes, V the target's vocabulary, M masks, W 32-bit words of a mask. Place 0 is the root, place
i + 1 node i. Token t is bit t % 32 of word t // 32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.tree import DraftTree
from eyas.verify.constraint import Constraint, Standing
from eyas.verify.grammar import executor


class LegalTree:
    """A batch of trees as their rows' constraints see it (None: a row without one).

    Making it moves the trees to the host: the one sync that constrained rows add. The masks are made when they are
    asked for, which on an accelerator is while the target's pass runs.
    """

    def __init__(self, constraints: Sequence[Constraint | None], tree: DraftTree, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._device = tree.tokens.device
        self._rows: list[tuple[int, Constraint, dict[int, Standing]]] = []
        table = torch.stack((tree.tokens, tree.parents, tree.valid.long()), dim=1).tolist()
        for row, (constraint, (tokens, parents, valid)) in enumerate(zip(constraints, table, strict=True)):
            if constraint is not None:
                self._rows.append((row, constraint, constraint.standings(tokens, parents, valid)))
        keep = [valid for _, _, valid in table]
        for row, _, standings in self._rows:
            keep[row] = [node + 1 in standings for node in range(tree.size)]
        pruned = torch.tensor(keep, dtype=torch.bool, device=self._device).reshape(tree.valid.shape)
        self.tree = dataclasses.replace(tree, valid=pruned)
        """The trees without their illegal nodes: the target needn't see those."""

    def masks(self) -> LegalTokens:
        """The masks of all places that are left."""
        places = [(row, place, c, s) for row, c, found in self._rows for place, s in found.items() if s.matcher]
        words = max((c.words for _, _, c, _ in places), default=0)
        made = np.zeros((len(places), words), dtype=np.uint32)
        jobs = [(standing.matcher, k) for k, (_, _, _, standing) in enumerate(places)]
        if jobs:
            executor().unsafe_compute_mask_ptr(jobs, made.ctypes.data, made.strides[0], len(jobs))
        width = (self._vocab_size + 31) // 32
        table = np.zeros((1 + len(places), width), dtype=np.uint32)
        table[0] = 0xFFFFFFFF  # for places where anything goes
        table[1:, :words] = made[:, :width]
        index = np.zeros((self.tree.tokens.shape[0], 1 + self.tree.size), dtype=np.int64)
        for k, (row, place, constraint, standing) in enumerate(places, 1):
            constraint.close(table[k], standing)
            index[row, place] = k
        return LegalTokens(
            torch.from_numpy(table.view(np.int32)).to(self._device),
            torch.from_numpy(index).to(self._device),
            self._vocab_size,
        )


@dataclasses.dataclass(frozen=True)
class LegalTokens:
    """Masks, and which one holds where."""

    words: Tensor  # [M, W] int32
    index: Tensor  # [B, 1 + N] the mask of each place
    vocab_size: int

    def at(self, place: Tensor) -> Tensor:
        """[B, V] bool: the tokens that are legal at `place` [B]."""
        row = torch.arange(place.shape[0], device=place.device)
        words = self.words[self.index[row, place]]  # [B, W]
        bits = torch.arange(32, dtype=torch.int32, device=place.device)
        return ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, : self.vocab_size].to(torch.bool)
