"""The sampling state of one walk: it starts at the committed state and never changes it.

Shapes: B rows, V vocabulary, P positions whose noise is made in one go.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eyas.verify.needs import Needs
from eyas.verify.noise import gumbel
from eyas.verify.penalties import forbid, penalise_counts, penalise_repetition
from eyas.verify.slots import Slots
from eyas.verify.warpers import keep_min_p, keep_top_k, keep_top_p

_NOISE_BLOCK = 1 << 18
"""Most noise values made in one go when there is more than one position; it keeps temporaries in cache."""


class PathState:
    """Samples tokens for the slots `rows`, one level after the other.

    `steps` is how many levels the walk will sample at most. It only says how much noise to make at once.
    """

    def __init__(self, slots: Slots, needs: Needs, rows: range, steps: int = 1) -> None:
        self.needs = needs
        self._slots = slots
        self._rows = slice(rows.start, rows.stop)
        self._step = 0
        self._counts: Tensor | None = None  # [B, V], our own copy once a token was appended
        self._block = min(steps, max(1, _NOISE_BLOCK // max(1, len(rows) * slots.vocab_size)))
        self._noise: Tensor | None = None  # [B, P, V], the first of them for step `_noise_start`
        self._noise_start = 0

    def sample(self, logits: Tensor) -> Tensor:
        """The tokens [B] that follow the path, given the target's `logits` [B, V]."""
        return self.choose(self.warped(logits))

    def choose(self, warped: Tensor) -> Tensor:
        """The tokens [B] drawn from `warped` logits [B, V]: Gumbel-max, or the argmax for greedy rows."""
        return self.scores(warped).argmax(dim=-1)

    def scores(self, warped: Tensor) -> Tensor:
        """[B, V] what `choose` takes the argmax of: `warped` logits and the noise of this position."""
        if not self.needs.noise:
            return warped
        scale = self._slots.noise_scale[self._rows].unsqueeze(1)
        return torch.addcmul(warped, self._noise_here(), scale)

    def warped(self, logits: Tensor) -> Tensor:
        """`logits` [B, V] in float32 with every parameter but the noise applied; -inf = ruled out.

        Greedy rows are not divided by a temperature and not filtered. What a grammar rules out is -inf already; it
        wins over bans: where they leave nothing of what is legal, they are not applied.
        """
        needs, slots, rows = self.needs, self._slots, self._rows
        given = logits = logits.to(torch.float32)
        if needs.bias:
            logits = logits + slots.make_table("bias")[rows]
        if needs.history:
            counts = slots.make_table("counts")[rows] if self._counts is None else self._counts
            if needs.repetition:
                seen = slots.make_table("prompt")[rows] | (counts > 0)
                logits = penalise_repetition(logits, seen, slots.repetition[rows])
            if needs.counts:
                logits = penalise_counts(logits, counts, slots.presence[rows], slots.frequency[rows])
        if needs.min_tokens:
            early = slots.generated[rows] + self._step < slots.min_tokens[rows]
            logits = forbid(logits, slots.make_table("stops")[rows], early)
        if needs.grammar:
            nothing = logits.amax(dim=-1, keepdim=True) == -math.inf
            logits = torch.where(nothing, given, logits)
        if needs.temperature:
            logits = logits / slots.divisor[rows].unsqueeze(1)
        if needs.top_k:
            logits = keep_top_k(logits, slots.top_k[rows], needs.top_k)
        if needs.top_p:
            logits = keep_top_p(logits, slots.top_p_cut[rows])
        if needs.min_p:
            logits = keep_min_p(logits, slots.min_p[rows])
        return logits

    def advance(self, tokens: Tensor) -> None:
        """Append `tokens` [B] to the path."""
        self._step += 1
        if self.needs.history:
            if self._counts is None:
                self._counts = self._slots.make_table("counts")[self._rows].clone()
            index = tokens.unsqueeze(1)
            self._counts.scatter_add_(1, index, torch.ones_like(index, dtype=self._counts.dtype))

    def _noise_here(self) -> Tensor:
        """[B, V] noise of the current position, made for the next few positions at once."""
        if self._noise is None or self._step >= self._noise_start + self._noise.shape[1]:
            device = self._slots.position.device
            ahead = torch.arange(self._step, self._step + self._block, device=device)  # [P]
            positions = self._slots.position[self._rows].unsqueeze(1) + ahead
            self._noise = gumbel(self._slots.seed[self._rows], positions, self._slots.token_ids)
            self._noise_start = self._step
        return self._noise[:, self._step - self._noise_start]
