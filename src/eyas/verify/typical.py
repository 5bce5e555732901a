"""Typical acceptance: LOSSY. It trades the target's distribution for longer accepted drafts.

Medusa's rule (arXiv 2401.10774): a draft token is good enough when the target finds it not too improbable,
p(x) > min(epsilon, delta * exp(-H(p))), whether or not the target would have sampled it. The threshold
sinks where the target is unsure. Probable tokens that are drafted are emitted more often than p says, and
at temperature 0 a token that is not the best may be emitted: outputs differ from plain decoding's, so this
is never the default.

p is the target's distribution after penalties, temperature and filters. A greedy row has no temperature:
there p is the distribution at temperature 1, unfiltered, and the closing token is the argmax.

Shapes: B rows, N nodes, D the tree's greatest depth, V vocabulary; places as in `walk`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.errors import UsageError
from eyas.tree import DraftTree, PlaceLogits
from eyas.verify.sampler import Sampler
from eyas.verify.walk import Walk


class TypicalWalk:
    """Moves to the most probable acceptable child; where there is none, samples the last token."""

    lossless = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not (0.0 <= epsilon <= 1.0 and delta >= 0.0):
            raise UsageError(f"typical acceptance: epsilon {epsilon} must be in [0, 1], delta {delta} at least 0")
        self.epsilon = epsilon
        self.delta = delta

    def __call__(self, logits: PlaceLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        path = sampler.path(rows, tree.max_depth + 1)
        row = torch.arange(len(rows), device=logits.index.device)
        place = torch.zeros_like(row)  # [B]
        places, tokens = [place], []
        for _ in range(tree.max_depth):
            warped = path.warped(logits.at(place))  # [B, V]
            found, child = self._best_child(warped, tree, place)
            tokens.append(torch.where(found, tree.tokens[row, child], path.choose(warped)))
            path.advance(tokens[-1])
            place = torch.where(found, child + 1, tree.size + 1)
            places.append(place)
        tokens.append(path.sample(logits.at(place)))
        return Walk.of(torch.stack(places, dim=1), torch.stack(tokens, dim=1), tree.size)

    def _best_child(self, warped: Tensor, tree: DraftTree, place: Tensor) -> tuple[Tensor, Tensor]:
        """Is there an acceptable child of `place` [B], and which node is the most probable: two [B]."""
        probs = warped.softmax(dim=-1)
        entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)  # [B, 1]
        drafted = probs.gather(1, tree.tokens)  # [B, N]
        good = (drafted > threshold) & tree.valid & (tree.parents + 1 == place.unsqueeze(1))
        best, child = drafted.masked_fill(~good, -1.0).max(dim=1)
        return best >= 0, child
