"""Decoding with a network that reads the same masked pair in every slot after a row's last true pair (P-EAGLE).

The true pairs are read and kept as any network's are. A draft is one more causal pass, over the masked slots, in
staging columns. What a slot guesses doesn't depend on the guesses before it, so a level has the same for all nodes.

Shapes: R rows (a contiguous range of slots), D slots of a draft, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafters.decoding import Levels, NetworkDrafter
from eyas.drafters.network import DraftNetwork
from eyas.tree import Frontier


class ParallelDrafter(NetworkDrafter):
    """A drafter whose network has a masked pair."""

    @torch.inference_mode()
    def __init__(self, network: DraftNetwork, taps: tuple[int, ...]) -> None:
        super().__init__(network, taps)
        pair = network.masked_pair()
        assert pair is not None
        self._masked = pair._replace(state=pair.state.to(network.dtype))  # the same in every draft

    def _start(self, rows: range, depth: int) -> tuple[Levels, Tensor]:
        levels = _SlotLevels(self.network.logits(self._slots(rows, depth)))
        return levels, levels.first()

    def _slots(self, rows: range, depth: int) -> Tensor:
        """The states [R, D, H] that the head reads in each row's next `depth` slots."""
        known = self._normed[rows.start : rows.stop].unsqueeze(1)
        count, more = len(rows), depth - 1
        if not more:
            return known
        tokens = torch.full((count, more), self._masked.token, device=self._ids.device)
        _, normed = self._run_pairs(rows, tokens, self._masked.state.expand(count, more, -1), more)
        return torch.cat((known, normed.view(count, more, -1)), dim=1)


class _SlotLevels:
    """The levels of one draft, whose logits [R, D, Vd] are all known."""

    def __init__(self, logits: Tensor) -> None:
        self._logits, self._slot = logits, 0

    def first(self) -> Tensor:
        """The logits [R, 1, Vd] of what follows the roots."""
        return self._logits[:, :1]

    def add(self, frontier: Frontier) -> Tensor:  # noqa: ARG002
        """The logits [R, 1, Vd] of what follows all of the next level's nodes."""
        self._slot += 1
        return self._logits[:, self._slot : self._slot + 1]
