"""Functions of tensors that the native kernels compute: products, attention, the best tokens of logits."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from eyas.targets.native.library import Linear, kernels, loaded_kernels
from eyas.targets.threads import threads_for


def multiplied(linear: Linear, x: Tensor, rounds: bool) -> Tensor:
    """Multiply x [..., in] by a weight as the kernels take it -> [T, out] in float32; `rounds`: round to bfloat16."""
    flat = x.reshape(-1, linear.in_).float().contiguous()
    out = torch.empty(len(flat), linear.out)
    loaded_kernels().linear(
        byref(linear), flat.data_ptr(), len(flat), out.data_ptr(), rounds, threads_for(out.numel() * linear.in_)
    )
    return out


def native_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor | None:
    """Attention [R, Q, heads, Dv] of query [R, heads, Q, D] over key and value [R, kv_heads, K, D / Dv].

    `mask` [R or 1, 1, Q, K], bool or additive, says which keys a query sees. The others don't affect its sums, not even
    their order. Returns None if the kernels don't take such tensors.
    """
    found = kernels()
    kinds = (torch.float32, torch.bfloat16)
    rows, heads, columns, size = query.shape
    if found is None or query.device.type != "cpu" or query.dtype not in kinds or key.dtype != query.dtype:
        return None
    if size % found.lanes or value.shape[3] % found.lanes:
        return None
    key, value = (held if held.stride()[2:] == (held.shape[3], 1) else held.contiguous() for held in (key, value))
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    wide = query.float().contiguous()
    seen = seen.expand(rows, -1, -1).contiguous()
    out = torch.empty(rows, columns, heads, value.shape[3])
    sizes = torch.tensor([rows, heads, columns, size, key.shape[1], key.shape[2], value.shape[3]])
    strides = torch.tensor([*key.stride()[:2], *value.stride()[:2]])
    found.attention(
        wide.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        seen.data_ptr(),
        out.data_ptr(),
        sizes.data_ptr(),
        strides.data_ptr(),
        size**-0.5 if scale is None else scale,
        query.dtype == torch.bfloat16,
        threads_for(query.numel() * key.shape[2]),
    )
    return out.to(query.dtype)


def native_guesses(logits: Tensor, count: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The `count` greatest log-probabilities of each row of logits [..., V], best first, and their tokens in `ids` [V].

    Both are [..., count], in float32 and int64; equal ones are in the order of their logits.
    """
    logits, shape = logits.contiguous(), (*logits.shape[:-1], count)
    scores = torch.empty(shape)
    found = torch.empty(shape, dtype=torch.int64)
    size = logits.shape[-1]
    loaded_kernels().guess(
        logits.data_ptr(),
        logits.numel() // size,
        size,
        logits.dtype == torch.bfloat16,
        ids.data_ptr(),
        count,
        scores.data_ptr(),
        found.data_ptr(),
        threads_for(logits.numel()),
    )
    return scores, found
