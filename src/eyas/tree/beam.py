"""The beam that dynamic and shared trees grow candidates with (EAGLE-2, arXiv 2406.16858).

Each level offers a few children of every beam node; the best paths so far go on. Which of all candidates make the tree
is the subclass's business.
Shapes: B rows, W beam nodes, K children offered by each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.tree.growth import Frontier


class BeamGrowth:
    """Candidates of up to `depth` levels, `fanout` children and beam nodes each."""

    def __init__(self, depth: int, fanout: int, batch: int, device: torch.device) -> None:
        self._depth, self._fanout = depth, fanout
        self._beam_score = torch.zeros(batch, 1, device=device)  # [B, W] logarithm of the value
        self._beam_told = self._beam_score  # [B, W] log-probability
        self._beam_index = torch.full((batch, 1), -1, dtype=torch.int64, device=device)  # [B, W] into candidates
        self._tokens: list[Tensor] = []  # each [B, W * K]
        self._scores: list[Tensor] = []
        self._told: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._beams: list[Tensor] = []  # each [B, W'] into the level's candidates
        self._count = 0

    @property
    def fanout(self) -> int:
        return self._fanout

    def expand(self, logprob: Tensor, tokens: Tensor) -> Frontier | None:
        fanout = tokens.shape[2]
        # clamped: a score above its parent's, be it by rounding, would let a child outrank the parent
        steps = logprob.clamp(max=0.0)
        worth = self._worth(steps)
        scores = told = (self._beam_score.unsqueeze(2) + worth).flatten(1)  # [B, W * K]
        if worth is not steps:
            told = (self._beam_told.unsqueeze(2) + steps).flatten(1)
        flat = tokens.flatten(1)
        self._tokens.append(flat)
        self._scores.append(scores)
        self._told.append(told)
        self._parents.append(self._beam_index.repeat_interleave(fanout, dim=1))
        offset, self._count = self._count, self._count + flat.shape[1]
        if len(self._tokens) == self._depth:
            return None
        self._beam_score, best = scores.topk(min(self._fanout, scores.shape[1]), dim=1)  # [B, W']
        if not self._worth_going_on():
            return None
        self._beam_told = told.gather(1, best)
        self._beam_index = best + offset
        self._beams.append(best)
        return Frontier(flat.gather(1, best), best // fanout)

    def _worth(self, steps: Tensor) -> Tensor:
        """[B, W, K] logarithms, 0 at most, of what children with log-probabilities `steps` add to a path's value."""
        return steps

    def _worth_going_on(self) -> bool:
        """Is another level wanted? `_beam_score` has the best paths."""
        return True
