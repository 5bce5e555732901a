"""Changes to the logits that depend on the tokens so far; each an exact identity for a row that has it off.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Weaken tokens `seen` [B, V] in prompt or answer by `penalty` [B] (CTRL, arXiv 1909.05858; 1 = off)."""
    factor = penalty.unsqueeze(1)
    return torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)


def penalise_counts(logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """OpenAI's penalties: `presence` [B] once, `frequency` [B] each of `counts` [B, V] times."""
    return logits - (frequency.unsqueeze(1) * counts + presence.unsqueeze(1) * (counts > 0))


def forbid(logits: Tensor, tokens: Tensor, active: Tensor) -> Tensor:
    """Rule out the `tokens` [B, V] (bool) in the rows that are `active` [B] (bool)."""
    return logits.masked_fill(tokens & active.unsqueeze(1), -math.inf)
