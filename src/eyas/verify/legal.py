"""Which tokens are legal at the places of a batch of draft trees.

Shapes: B rows, N nodes, V the target's vocabulary, M masks, W 32-bit words of a mask. Place 0 is the root, place
i + 1 node i. Token t is bit t % 32 of word t // 32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eyas.tree import DraftTree, PlaceLogits
from eyas.verify.constraint import Constraint, Mask, Standing
from eyas.verify.grammar import executor

Place = tuple[int, int, Constraint, Standing]
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

    def restrict(self, logits: PlaceLogits) -> LegalLogits:
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
class LegalLogits(PlaceLogits):
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
            constraint.close(made[row], Standing(matcher))
            masks[k] = made[row]
            if place == 0:
                constraint.root_mask = made[row]
    return [mask for mask in masks if mask is not None]
