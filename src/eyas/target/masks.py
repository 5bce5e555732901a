"""Attention masks of a pass over staged columns, one per attention type.

Column c < start of row b holds the token at position c if c < length[b] (else it is stale or another row's
staging); column start + i holds node i of the pass, which only its descendants may see.
Shapes: R rows, Q columns of the pass, K = start + Q.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible(lengths: Tensor, start: int, ancestors: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """[R, 1, Q, K] bool: may query q see column k?

    lengths [R] committed tokens; ancestors [R or 1, Q, Q] bool, each column an ancestor of itself;
    positions [R, Q]; window: how many latest positions, its own included, a query sees (None = all).
    """
    rows, width = positions.shape
    columns = torch.arange(start, device=positions.device)
    committed = (columns < lengths.unsqueeze(1)).unsqueeze(1).expand(rows, width, start)
    staged = ancestors.expand(rows, width, width)
    if window is not None:
        oldest = positions.unsqueeze(2) - window  # [R, Q, 1]
        committed = committed & (columns > oldest)
        staged = staged & (positions.unsqueeze(1) > oldest)
    return torch.cat((committed, staged), dim=2).unsqueeze(1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, the lowest finite number elsewhere: what every attention implementation can add."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)
