"""Attention of blocks: each block sees the target's states before its anchor, and its own slots in both directions.

Blocks of one chat share their keys and values of the context, and several of them are computed together, as many as
`ROWS` queries hold. The backward pass recomputes the weights from the log-sum-exp, so neither a mask of all blocks nor
a score matrix is kept, and no copy of the context for each block.

Shapes: n blocks of B slots, C chats, S positions, D / Dv head size of keys / values, heads = kv * G; c blocks that are
computed together, stop = the positions that the last of them sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 256
"""Queries of a head that are computed together."""


class Anchors(NamedTuple):
    """The blocks of a batch, ordered by chat and position."""

    rows: Tensor  # [n] int64: the last pair before each block, as an index into C * S; the anchor is that pair's token
    chats: list[int]
    positions: list[int]
    """The position of each row within its chat: the last one that the block sees."""


class BlockAttention:
    """The `attend` function of a pass over blocks, and the `store` function of the context before it."""

    def __init__(self, anchors: Anchors) -> None:
        self._anchors = anchors
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's keys and values [C, kv, S, .] of the context."""
        self._context[layer] = keys, values

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, B, D], k [n, kv, B, D], v [n, kv, B, Dv] -> [n, heads, B, Dv]."""
        kind = q.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
        tensors = (x.to(dtype) for x in (q, k, v, *self._context[layer]))
        out: Tensor = _Blocks.apply(self._anchors, *tensors)  # type: ignore[no-untyped-call]
        return out


class _Part(NamedTuple):
    """Blocks that are computed together: c blocks of one chat."""

    blocks: slice
    chat: int
    stop: int
    hidden: Tensor  # [c, 1, stop] bool: context positions after each block's anchor


def _parts(anchors: Anchors, slots: int, device: torch.device) -> Iterator[_Part]:
    most, start = max(1, ROWS // slots), 0
    while start < len(anchors.chats):
        chat, end = anchors.chats[start], start
        while end < len(anchors.chats) and anchors.chats[end] == chat and end - start < most:
            end += 1
        last = torch.tensor(anchors.positions[start:end], device=device)
        stop = anchors.positions[end - 1] + 1
        hidden = torch.arange(stop, device=device) > last.view(-1, 1, 1)
        yield _Part(slice(start, end), chat, stop, hidden)
        start = end


def _scores(part: _Part, q: Tensor, keys: Tensor, own: Tensor) -> Tensor:
    """Scores [c, kv, G * B, stop + B] of queries [c, kv, G * B, D], scaled already."""
    precise = torch.promote_types(q.dtype, torch.float32)
    kv, rows = q.shape[1], q.shape[2]
    folded = q.transpose(0, 1).flatten(1, 2)  # [kv, c * G * B, D]: one product for all blocks
    context = torch.unflatten((folded @ keys.transpose(1, 2)).to(precise), 1, (-1, rows)).transpose(0, 1)
    context = context.masked_fill(part.hidden.unsqueeze(1).expand(-1, kv, rows, -1), -torch.inf)
    return torch.cat((context, (q @ own.transpose(2, 3)).to(precise)), dim=-1)


class _Blocks(torch.autograd.Function):
    """Both parts of the softmax together; the backward pass has only the log-sum-exp to go by."""

    @staticmethod
    def forward(ctx: Any, anchors: Anchors, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        grouped = _grouped(q, k.shape[1])
        out = grouped.new_empty(*grouped.shape[:3], v.shape[-1])
        lse = grouped.new_empty(*grouped.shape[:3], 1, dtype=torch.promote_types(q.dtype, torch.float32))
        for part in _parts(anchors, q.shape[2], q.device):
            at, seen = part.blocks, slice(part.stop)
            scores = _scores(part, grouped[at], keys[part.chat, :, seen], k[at])
            lse[at] = scores.logsumexp(-1, keepdim=True)
            weights = scores.sub_(lse[at]).exp_().to(v.dtype)
            out[at] = _mixed(weights, values[part.chat, :, seen], v[at])
        ctx.anchors = anchors
        ctx.save_for_backward(q, k, v, keys, values, out, lse)
        return _ungrouped(out, q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, values, out, lse = ctx.saved_tensors
        kv, scale = k.shape[1], q.shape[-1] ** -0.5
        grouped, dout = _grouped(q, kv), _plain(grad, kv)
        delta = (dout * out).sum(-1, keepdim=True, dtype=lse.dtype)
        dq, dk, dv = torch.empty_like(grouped), torch.empty_like(k), torch.empty_like(v)
        dkeys, dvalues = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (keys, values))
        for part in _parts(ctx.anchors, q.shape[2], q.device):
            at, chat, seen = part.blocks, part.chat, slice(part.stop)
            weights = _scores(part, grouped[at], keys[chat, :, seen], k[at]).sub_(lse[at]).exp_()
            down, split = dout[at], [part.stop, k.shape[2]]
            slope = torch.cat(
                (
                    (_folded(down) @ values[chat, :, seen].transpose(1, 2))
                    .unflatten(1, (len(down), -1))
                    .transpose(0, 1),
                    down @ v[at].transpose(2, 3),
                ),
                dim=-1,
            )
            dscores = (slope.to(lse.dtype).sub_(delta[at]).mul_(weights)).to(q.dtype)
            above, own = torch.split(dscores, split, dim=-1)
            weights_above, weights_own = torch.split(weights.to(v.dtype), split, dim=-1)
            dq[at] = _mixed(dscores, keys[chat, :, seen], k[at])
            dk[at] = own.transpose(2, 3) @ grouped[at]
            dv[at] = weights_own.transpose(2, 3) @ down
            dkeys[chat, :, seen] += _folded(above).transpose(1, 2) @ _folded(grouped[at])
            dvalues[chat, :, seen] += _folded(weights_above).transpose(1, 2) @ _folded(down)
        return None, _ungrouped(dq.mul_(scale), q), dk, dv, dkeys.to(keys.dtype), dvalues.to(values.dtype)


def _grouped(q: Tensor, kv: int) -> Tensor:
    """Queries [n, heads, B, D], scaled -> [n, kv, G * B, D]."""
    return _plain(q * q.shape[-1] ** -0.5, kv)


def _plain(x: Tensor, kv: int) -> Tensor:
    """[n, heads, B, D] -> [n, kv, G * B, D]."""
    return torch.unflatten(x, 1, (kv, -1)).flatten(2, 3)


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """[n, kv, G * B, D] -> [n, heads, B, D]."""
    return torch.unflatten(x, 2, (-1, like.shape[2])).flatten(1, 2)


def _folded(x: Tensor) -> Tensor:
    """[c, kv, G * B, .] -> [kv, c * G * B, .]: what has the same keys as one matrix."""
    return x.transpose(0, 1).flatten(1, 2)


def _mixed(weights: Tensor, context: Tensor, own: Tensor) -> Tensor:
    """weights [c, kv, G * B, stop + B] of context [kv, stop, D] and own [c, kv, B, D] -> [c, kv, G * B, D]."""
    above, below = torch.split(weights, [context.shape[1], own.shape[2]], dim=-1)
    mixed = torch.unflatten(_folded(above) @ context, 1, (len(weights), -1)).transpose(0, 1)
    return mixed + below @ own
