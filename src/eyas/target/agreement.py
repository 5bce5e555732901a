"""Does a model run in another way still say the same? What is tried at load is judged by this."""

from __future__ import annotations

import torch
from torch import Tensor


def agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Are two tensors of logits equal but for the rounding of a model in `dtype`? Never where one is no number."""
    gap, scale = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
    return bool(gap <= scale * (1e-3 if dtype == torch.float32 else 5e-2))
