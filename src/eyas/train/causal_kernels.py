"""Causal attention that also tells its log-sum-exp, forward and backward, from whatever kernel the device has.

The backward of each takes `out` and `lse` from its caller. Given those of a softmax over *more* keys than the kernel
knows, it returns the exact gradients of the part it does know: P = exp(S - lse) and dS = P * (dP - sum(dO * O)) need
nothing else of the keys that aren't there.

Shapes: B chats, S positions, D / Dv head size of keys / values, heads = kv * G.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = 64
"""Query rows of `Blocked` handled together: keys after the block's end are never touched, which halves the work."""


class Attended(NamedTuple):
    """What a forward leaves: out [B, heads, S, Dv], lse [B, heads, S] (float32, or float64), and the kernel's own."""

    out: Tensor
    lse: Tensor
    extra: tuple[Any, ...] = ()


class CausalKernel(Protocol):
    """q [B, heads, S, D], k [B, kv, S, D], v [B, kv, S, Dv]; scores are scaled by D ** -0.5."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Attended: ...

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v for `grad` [B, heads, S, Dv]."""


def choose_kernel(q: Tensor, v: Tensor) -> CausalKernel:
    """The fastest kernel that takes these tensors.

    On CPU torch's flash kernel and blocked matmuls differ by less than a tenth at 512 positions; from there on flash is
    faster, and it keeps bfloat16 scores in float32 (docs/log.md has the numbers).
    """
    size, same = q.shape[-1], q.shape[-1] == v.shape[-1]
    if not q.is_cuda:
        return CpuFlash() if same else Blocked()
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and same and size % 8 == 0 and size <= 256 and torch.cuda.get_device_capability(q.device)[0] >= 8:
        return CudaFlash()
    if (half or q.dtype == torch.float32) and size % 8 == 0 and v.shape[-1] % 8 == 0:
        return CudaEfficient()
    return Blocked()


class CpuFlash:
    """torch's CPU flash kernel: one size for keys and values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        return Attended(*torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True))

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Attended) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, done.out, done.lse, 0.0, True
        )
        return grads


class CudaFlash:
    """FlashAttention: half precision, one size for keys and values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        out, lse, *extra = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        return Attended(out, lse, tuple(extra[:6]))

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Attended) -> tuple[Tensor, Tensor, Tensor]:
        cum_q, cum_k, max_q, max_k, seed, offset = done.extra
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, done.out, done.lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
        )
        return grads


class CudaEfficient:
    """Memory-efficient attention: float32 too, values of their own size, but no shared keys and a padded lse."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        out, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        return Attended(out, lse.narrow(2, 0, q.shape[2]), (lse, seed, offset))

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Attended) -> tuple[Tensor, Tensor, Tensor]:
        padded, seed, offset = done.extra
        width = q.shape[2]
        padded = torch.cat((done.lse, padded.narrow(2, width, padded.shape[2] - width)), dim=2)
        wide_k, wide_v = (_repeated(x, q.shape[1]) for x in (k, v))
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, wide_k, wide_v, None, done.out, padded, seed, offset, 0.0, [True, True, True, False], True
        )
        return dq, *(torch.unflatten(g, 1, (k.shape[1], -1)).sum(2) for g in (dk, dv))


class Blocked:
    """Plain matmuls over blocks of rows, scores made again in the backward pass: any device, size and type."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        batch, heads, width, _ = q.shape
        out = q.new_empty(batch, width, heads, v.shape[-1]).transpose(1, 2)  # rows together, as the next linear reads
        lse = q.new_empty(batch, heads, width, dtype=_precise(q.dtype))
        for start in range(0, width, BLOCK):
            stop = min(start + BLOCK, width)
            scores = _scores(q, k, start, stop)  # [B, kv, G*R, stop]
            peak = scores.amax(-1, keepdim=True)
            weights = scores.sub_(peak).exp_()
            total = weights.sum(-1, keepdim=True)
            mixed = weights.to(v.dtype) @ v[:, :, :stop] / total.to(v.dtype)
            out[:, :, start:stop] = _rows(mixed, heads)
            lse[:, :, start:stop] = _rows(peak + total.log(), heads).squeeze(-1)
        return Attended(out, lse)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Attended) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv, scale = q.shape[1], k.shape[1], q.shape[-1] ** -0.5
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=done.lse.dtype, device=x.device) for x in (k, v))
        delta = (grad * done.out).sum(-1, dtype=done.lse.dtype).unsqueeze(-1)  # [B, heads, S, 1]
        for start in range(0, q.shape[2], BLOCK):
            stop = min(start + BLOCK, q.shape[2])
            folded = [_folded(x[:, :, start:stop], kv) for x in (grad, delta, done.lse.unsqueeze(-1), q)]
            dout, shift, lse, rows = folded
            weights = _scores(q, k, start, stop).sub_(lse).exp_()
            dv[:, :, :stop] += weights.to(v.dtype).transpose(2, 3) @ dout
            dscores = (dout @ v[:, :, :stop].transpose(2, 3)).to(lse.dtype).sub_(shift).mul_(weights).to(q.dtype)
            dq[:, :, start:stop] = _rows(dscores @ k[:, :, :stop] * scale, heads)
            dk[:, :, :stop] += dscores.transpose(2, 3) @ (rows * scale)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
    """Scaled, masked scores of query rows start..stop against keys ..stop: [B, kv, G*R, stop]."""
    rows = _folded(q[:, :, start:stop], k.shape[1]) * q.shape[-1] ** -0.5
    scores: Tensor = (rows @ k[:, :, :stop].transpose(2, 3)).to(_precise(q.dtype))
    later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
    torch.unflatten(scores, 2, (-1, stop - start))[..., start:].masked_fill_(later, float("-inf"))
    return scores


def _folded(x: Tensor, kv: int) -> Tensor:
    """[B, heads, R, D] -> [B, kv, G*R, D]: queries of a group share keys, so they are one matrix."""
    return torch.unflatten(x, 1, (kv, -1)).flatten(2, 3)


def _rows(x: Tensor, heads: int) -> Tensor:
    """[B, kv, G*R, D] -> [B, heads, R, D]."""
    return torch.unflatten(x, 2, (heads // x.shape[1], -1)).flatten(1, 2)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[B, kv, S, D] -> [B, heads, S, D]."""
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.promote_types(dtype, torch.float32)
