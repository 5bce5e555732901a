"""The target's logits at the places of a batch of trees, held once for every token that was really run.

Shapes: B rows, N nodes, T tokens of the pass, V vocabulary. A "place" counts the root as 0 and node i as i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlaceLogits:
    """Logits of T tokens and where each place's lie among them; places of invalid nodes show some other token's.

    Nothing of the size B x (1 + N) x V is ever made.
    """

    rows: Tensor  # [T, V]
    index: Tensor  # [B, 1 + N] int64 into `rows`

    @staticmethod
    def of(padded: Tensor) -> PlaceLogits:
        """From logits [B, 1 + N, V] at every place: a view."""
        batch, places = padded.shape[:2]
        index = torch.arange(batch * places, device=padded.device).view(batch, places)
        return PlaceLogits(padded.flatten(0, 1), index)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.rows.shape[1]

    def best(self) -> Tensor:
        """[B, 1 + N] the token with the highest logit at every place."""
        # `max`: several times faster than `argmax` on a CPU in half precision; the first of equals with both
        return self.rows.max(dim=-1).indices[self.index]

    def at(self, places: Tensor) -> Tensor:
        """[B, V] logits of one place of each row, `places` [B]; a place past the last one is the last one."""
        places = places.clamp(max=self.index.shape[1] - 1)
        return self.rows[self.index.gather(1, places.unsqueeze(1)).squeeze(1)]
