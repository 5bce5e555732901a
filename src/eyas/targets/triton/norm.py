"""Norms that no linear layer follows: of a part's output before it is added to the residual, and the final one.

Shapes: T tokens, n features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.targets.triton.linear import SAME, Norm, given, norm_statistics, normed

_BLOCK = 1024


@triton.jit(do_not_specialize=["eps", "factor"])
def _norm(  # type: ignore[no-untyped-def]
    x, norm, eps, residual, factor, made, stride: tl.constexpr, made_stride: tl.constexpr, features: tl.constexpr,
    twice: tl.constexpr, centered: tl.constexpr, adds: tl.constexpr, scaled: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    dtype = made.dtype.element_ty
    token = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    mean, deviation = norm_statistics(x, token * stride, token >= 0, features, centered, eps, block)
    for first in range(0, features, block):
        at = first + tl.arange(0, block)
        known = (at < features)[None, :]
        factors = tl.load(norm + at[None, :], known, 0.0)
        shifts = factors
        if centered:
            shifts = tl.load(norm + features + at[None, :], known, 0.0)
        values = tl.load(x + (token * stride)[:, None] + at[None, :], known, 0.0)
        value = normed(values, mean[:, None], deviation[:, None], factors, shifts, twice, centered).to(tl.float32)
        if scaled:
            value = (value * factor).to(dtype).to(tl.float32)
        place = (token * made_stride)[:, None] + at[None, :]
        if adds:
            value = value + tl.load(residual + place, known, 0.0).to(tl.float32)
        tl.store(made + place, value.to(dtype), known)


def normalize(
    x: Tensor, norm: Norm, residual: Tensor | None = None, factor: float = 1.0, made: Tensor | None = None
) -> Tensor:
    """Norm x [T, n], multiply it by `factor`, and add a `residual` [T, n] -> [T, n], in `made` if it is given.

    Rows of x may be apart; `made` may be x itself.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if made is None else made
    features = x.shape[1]
    _norm[(len(x),)](
        x, norm.values, norm.eps, given(residual, x), factor, out, x.stride(0), out.stride(0), features, norm.twice,
        norm.centered, residual is not None, factor != 1.0, min(_BLOCK, triton.next_power_of_2(features)),
        **SAME,
    )  # fmt: skip
    return out
