"""Gumbel coupling: the drafter ranks its candidates with the noise that the target will sample with.

The target emits argmax(its warped logits + noise). A drafter that adds the same noise to its own logits
proposes what the target will draw far more often than one that proposes its most likely tokens (arXiv
2408.07978). The output can't change: noise or not, the draft is only a guess.

Shapes: B rows, W nodes of one tree level, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.verify.legal import LegalTokens
from eyas.verify.needs import Needs
from eyas.verify.noise import gumbel
from eyas.verify.slots import Slots

_ILLEGAL = -1e9


class Coupling:
    """Turns drafter logits into log-probabilities to rank by, for the slots `rows`."""

    def __init__(
        self, slots: Slots, needs: Needs, rows: range, enabled: bool, legal: LegalTokens | None = None
    ) -> None:
        """`legal` says what may follow the root: nothing else is worth proposing there."""
        self._slots = slots
        self._needs = needs
        self._rows = slice(rows.start, rows.stop)
        self._noisy = enabled and needs.noise
        self._legal = legal

    def rank(self, logits: Tensor, steps_ahead: int, target_ids: Tensor | None) -> Tensor:
        """[B, W, Vd] float32 log-probabilities, temperature applied, given the noise if coupled.

        `steps_ahead` is 0 for the root's children, 1 for theirs, and so on. `target_ids` [Vd] are the
        target's ids of the draft vocabulary, None if it is the target's own.
        """
        slots, rows = self._slots, self._rows
        logits = logits.to(torch.float32)
        if self._needs.temperature:
            logits = logits / slots.divisor[rows, None, None]
        if self._noisy:
            ids = slots.token_ids if target_ids is None else target_ids
            noise = gumbel(slots.seed[rows], slots.position[rows].unsqueeze(1) + steps_ahead, ids)  # [B, 1, Vd]
            logits = torch.addcmul(logits, noise, slots.noise_scale[rows, None, None])
        if self._legal is not None and steps_ahead == 0:
            legal = self._legal.at(torch.zeros_like(slots.position[rows]))  # [B, V]
            legal = legal if target_ids is None else legal[:, target_ids]
            # finite: a draft vocabulary may have nothing that is legal
            logits = logits.masked_fill(~legal.unsqueeze(1), _ILLEGAL)
        return logits.log_softmax(dim=-1)
