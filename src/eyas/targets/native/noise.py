"""Tokens drawn from logits with Gumbel noise, which the native kernels make as they read the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.targets.native.library import KINDS, kernels, loaded_kernels
from eyas.targets.threads import threads_for

_NOISE_COST = 32
"""Multiplications that take as long as drawing one value of Gumbel noise."""


class Draw(NamedTuple):
    """How a token is drawn from logits that aren't processed otherwise."""

    divisor: float
    scale: float
    """Scale of the noise."""
    seed: int
    position: int


def native_rows(logits: Tensor) -> bool:
    """Whether the kernels can read single rows of logits [T, V]."""
    here = logits.device.type == "cpu" and logits.is_contiguous() and logits.dtype in KINDS
    return here and kernels() is not None


def best_token(logits: Tensor, row: int) -> int:
    """The token with the highest logit in a row of logits [T, V] on the host; of equal logits, the first."""
    if not native_rows(logits):
        return int(logits[row].max(dim=-1).indices)
    token: int = loaded_kernels().best(*_row(logits, row))
    return token


def drawn_token(logits: Tensor, row: int, draw: Draw, ahead: int) -> int:
    """The token drawn from a row of logits [T, V] that are `native_rows`, `ahead` positions after the draw's own.

    It is `(logits / divisor + scale * noise).argmax()` in float32, without holding the noise of all tokens in memory.
    """
    draw = draw._replace(position=draw.position + ahead)
    threads = threads_for(_NOISE_COST * logits.shape[1])
    token: int = loaded_kernels().draw(*_row(logits, row), *draw, threads)
    return token


def native_gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor | None:
    """Gumbel noise [B, P, V] for `seeds` [B], `positions` [B, P] and `ids` [V]; None if there are no kernels."""
    found = kernels()
    if found is None or seeds.device.type != "cpu":
        return None
    seeds = seeds.contiguous()
    positions = positions.contiguous()
    ids = ids.contiguous()
    out = torch.empty(*positions.shape, len(ids))
    found.gumbel(
        seeds.data_ptr(),
        positions.data_ptr(),
        *positions.shape,
        ids.data_ptr(),
        len(ids),
        out.data_ptr(),
        threads_for(_NOISE_COST * out.numel()),
    )
    return out


def _row(logits: Tensor, row: int) -> tuple[int, int, bool]:
    """A row of logits [T, V] as the kernels take it: its address, V, and whether it is in bfloat16."""
    size = logits.shape[1]
    return logits.data_ptr() + row * size * logits.element_size(), size, logits.dtype == torch.bfloat16
