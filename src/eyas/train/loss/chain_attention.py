"""Attention of a chain of guesses: causal over the true pairs, plus the row's own guesses, one key for each step.

Step j of a row at position i takes a softmax over i + 1 true keys and j keys of its own. The true part is a causal
attention like that of step 0, computed by a fused kernel that also returns its log-sum-exp L; own key m adds the score
s_m = q k_m / sqrt(D), a diagonal instead of a matrix. Merged:

    total = log(exp L + sum exp s_m),  out = exp(L - total) * out_true + sum exp(s_m - total) * v_m

No mask and no score matrix is stored. The backward pass gives the merged `out` and `total` to the kernel, which then
returns the exact gradients of the true part, and adds those of the diagonals:
ds_m = exp(s_m - total) * (dO v_m - sum(dO * out)).

Shapes: B chats, S positions, R rows a later step computes, D / Dv head size of keys / values, J own keys,
heads = kv * G.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyas.train.loss.causal_kernels import AttentionOutput, CausalKernel, choose_kernel


class ChainAttention:
    """The `attend` function of an unrolled chain. `indices` [R0] are the rows of later steps, as indices into B * S.

    Step 0 has queries [B, heads, S, D], each later step [1, heads, R, D] for the first R of `indices`; R never grows.
    """

    def __init__(self, indices: Tensor, kernel: CausalKernel | None = None) -> None:
        self._indices, self._kernel = indices, kernel
        self._true: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values of the true pairs
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> keys, values of each later step

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [., heads, ., D], k [., kv, ., D], v [., kv, ., Dv] -> [., heads, ., Dv]."""
        q, k, v = _cast(q, k, v)
        kernel = self._kernel or choose_kernel(q, v)
        if layer not in self._true:
            self._true[layer], self._own[layer] = (k, v), []
            out: Tensor = _Causal.apply(kernel, q, k, v)  # type: ignore[no-untyped-call]
            return out
        own = self._own[layer]
        own.append((k, v))
        indices = self._indices[: q.shape[2]]
        flat = [side for pair in own for side in pair]
        mixed: Tensor = _Chain.apply(kernel, indices, q, *self._true[layer], *flat)  # type: ignore[no-untyped-call]
        return mixed


class _Causal(torch.autograd.Function):
    """Step 0: causal attention of the true pairs."""

    @staticmethod
    def forward(ctx: Any, kernel: CausalKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        done = kernel.forward(q, k, v)
        ctx.kernel, ctx.extra = kernel, done.extra
        ctx.save_for_backward(q, k, v, done.out, done.lse)
        return done.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return None, *ctx.kernel.backward(grad, q, k, v, AttentionOutput(out, lse, ctx.extra))


class _Chain(torch.autograd.Function):
    """A later step: q [1, heads, R, D], the true keys and values [B, kv, S, .], then own pairs [1, kv, >= R, .]."""

    @staticmethod
    def forward(
        ctx: Any, kernel: CausalKernel, indices: Tensor, q: Tensor, k: Tensor, v: Tensor, *own: Tensor
    ) -> Tensor:
        done = kernel.forward(_spread(q, indices, k), k, v)
        lse = _spread_back(done.lse.unsqueeze(-1), indices)  # [1, heads, R, 1]
        count, kv = len(indices), k.shape[1]
        keys, values = (_stacked(own[side::2], count) for side in (0, 1))  # [R, kv, J, .]
        scores = (_grouped(q, kv) @ keys.transpose(2, 3)).to(lse.dtype) * q.shape[-1] ** -0.5  # [R, kv, G, J]
        true = _grouped(lse, kv)  # [R, kv, G, 1]
        total = torch.cat((true, scores), dim=-1).logsumexp(-1, keepdim=True)
        weights = (scores - total).exp()
        out = torch.addcmul(
            weights.to(v.dtype) @ values,
            _grouped(_spread_back(done.out, indices), kv),
            (true - total).exp().to(v.dtype),
        )
        ctx.kernel, ctx.extra, ctx.sizes = kernel, done.extra, [x.shape[2] for x in own]
        ctx.save_for_backward(indices, q, k, v, out, total, weights, *own)
        return _ungrouped(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indices, q, k, v, out, total, weights, *own = ctx.saved_tensors
        count, kv, scale = len(indices), k.shape[1], q.shape[-1] ** -0.5
        done = AttentionOutput(
            _spread(_ungrouped(out), indices, k), _spread(_ungrouped(total), indices, k).squeeze(-1), ctx.extra
        )
        dq, dk, dv = ctx.kernel.backward(_spread(grad, indices, k), _spread(q, indices, k), k, v, done)
        dout, queries = _grouped(grad, kv), _grouped(q, kv)
        keys, values = (_stacked(own[side::2], count) for side in (0, 1))
        delta = (dout * out).sum(-1, keepdim=True, dtype=total.dtype)
        dscores = (weights * ((dout @ values.transpose(2, 3)).to(total.dtype) - delta) * scale).to(q.dtype)
        dq = _spread_back(dq, indices) + _ungrouped(dscores @ keys)
        dkeys = dscores.transpose(2, 3) @ queries  # [R, kv, J, D]
        dvalues = weights.to(v.dtype).transpose(2, 3) @ dout
        down = [
            torch.nn.functional.pad(part[:, :, i // 2].transpose(0, 1).unsqueeze(0), (0, 0, 0, size - count))
            for i, size in enumerate(ctx.sizes)
            for part in ((dkeys, dvalues)[i % 2],)
        ]
        return None, None, dq, dk, dv, *down


def _cast(*tensors: Tensor) -> list[Tensor]:
    """Cast to the autocast dtype, if any: rotated queries and keys have the dtype of the rotation."""
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[0].dtype
    return [x.to(dtype) for x in tensors]


def _spread(rows: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """Scatter [1, heads, R, D] to [B, heads, S, D] with `like`'s B and S; zeros where there is no row.

    Zeros don't affect a kernel's backward pass: where no gradient comes in, none goes out.
    """
    batch, _, width, _ = like.shape
    heads, size = rows.shape[1], rows.shape[3]
    full = rows.new_zeros(batch * width, heads, size)
    full.index_copy_(0, indices, rows[0].transpose(0, 1))
    return torch.unflatten(full, 0, (batch, width)).transpose(1, 2)


def _spread_back(full: Tensor, indices: Tensor) -> Tensor:
    """Gather the rows of [B, heads, S, D] as [1, heads, R, D]."""
    return full.transpose(1, 2).flatten(0, 1).index_select(0, indices).transpose(0, 1).unsqueeze(0)


def _grouped(x: Tensor, kv: int) -> Tensor:
    """[1, heads, R, D] -> [R, kv, G, D]."""
    return torch.unflatten(x[0].transpose(0, 1), 1, (kv, -1))


def _ungrouped(x: Tensor) -> Tensor:
    """[R, kv, G, D] -> [1, heads, R, D]."""
    return x.flatten(1, 2).transpose(0, 1).unsqueeze(0)


def _stacked(own: tuple[Tensor, ...] | list[Tensor], count: int) -> Tensor:
    """The first `count` rows of J tensors [1, kv, >= R, D] -> [R, kv, J, D]."""
    return torch.stack([x[0, :, :count].transpose(0, 1) for x in own], dim=2)
