"""Attention of blocks: each block sees the target's states before its anchor, and its own slots in both directions.

Neighbouring blocks of a chat are computed together, as many as `ROWS` queries hold: one product with the context that
the last of them sees and with all of their own slots, under a mask of that size. So there is no mask of all blocks, no
copy of the context for each of them, and few products are made of what is hidden. The context's gradients are added to
one buffer a layer, since slices of it that autograd adds up would cost a whole context each.

Shapes: n blocks of B slots, C chats, S positions, D / Dv head size of keys / values, heads = kv * G; c blocks that are
computed together, stop = the positions that the last of them sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

ROWS = 64
"""Slots that are computed together: with more, more of a product is hidden; with fewer, products are small."""


class Anchors(NamedTuple):
    """Blocks of a batch, ordered by chat and position."""

    rows: Tensor  # [n] int64: the last pair before each block, as an index into C * S; the anchor is that pair's token
    chats: list[int]
    positions: list[int]
    """The position of each row within its chat: the last one that the block sees."""

    def part(self, blocks: slice) -> Anchors:
        """Some of the blocks, all of the same batch."""
        return Anchors(self.rows[blocks], self.chats[blocks], self.positions[blocks])


class BlockAttention:
    """The `attend` function of a pass over blocks, and the `store` function of the context before it."""

    def __init__(self, anchors: Anchors) -> None:
        self._anchors = anchors
        self._context: dict[int, tuple[tuple[Tensor, Tensor | None], ...]] = {}
        self._parts: list[_Part] | None = None

    def store(
        self, layer: int, keys: Tensor, values: Tensor, buffers: tuple[Tensor | None, Tensor | None] = (None, None)
    ) -> None:
        """Keep a layer's keys and values [C, kv, S, .] of the context.

        Their gradients are added to `buffers` of the same shapes; where there are none autograd gets them.
        """
        self._context[layer] = tuple(zip((keys, values), buffers, strict=True))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, B, D], k [n, kv, B, D], v [n, kv, B, Dv] -> [n, heads, B, Dv]."""
        kind, count = q.device.type, q.shape[2]
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
        if self._parts is None:  # the same in all layers
            self._parts = list(_parts(self._anchors, count, q.shape[1] // k.shape[1], q.device))
        mixed = [v.new_empty(0, count, q.shape[1], v.shape[-1], dtype=dtype)]  # [., B, heads, Dv]
        for part in self._parts:
            keys, values = (
                _joined(own[part.blocks].to(dtype), context, buffer, part)
                for own, (context, buffer) in zip((k, v), self._context[layer], strict=True)
            )
            queries = q[part.blocks].to(dtype).transpose(0, 1)  # [heads, c, B, D]
            folded = queries.reshape(1, k.shape[1], -1, q.shape[-1])  # [1, kv, G * c * B, D]
            out = F.scaled_dot_product_attention(folded, keys, values, part.seen)
            mixed.append(out.view(*queries.shape[:3], -1).permute(1, 2, 0, 3))
        return torch.cat(mixed).transpose(1, 2)


class _Part(NamedTuple):
    """Blocks that are computed together: c blocks of one chat."""

    blocks: slice
    chat: int
    stop: int
    seen: Tensor  # [G * c * B, stop + c * B] bool


def _parts(anchors: Anchors, slots: int, groups: int, device: torch.device) -> Iterator[_Part]:
    most, start = max(1, ROWS // slots), 0
    while start < len(anchors.chats):
        chat, end = anchors.chats[start], start
        while end < len(anchors.chats) and anchors.chats[end] == chat and end - start < most:
            end += 1
        stop = anchors.positions[end - 1] + 1
        last, block = (
            torch.tensor(each, device=device).repeat_interleave(slots)
            for each in (anchors.positions[start:end], range(end - start))
        )
        context = torch.arange(stop, device=device) <= last.unsqueeze(1)
        seen = torch.cat((context, block.unsqueeze(1) == block), dim=1)
        yield _Part(slice(start, end), chat, stop, seen.repeat(groups, 1))
        start = end


def _joined(own: Tensor, context: Tensor, buffer: Tensor | None, part: _Part) -> Tensor:
    made: Tensor = _Joined.apply(own, context, buffer, part)  # type: ignore[no-untyped-call]
    return made


class _Joined(torch.autograd.Function):
    """Keys or values of the context [C, kv, S, .] that a part sees, then its own [c, kv, B, .] -> [1, kv, ., .]."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: Tensor, buffer: Tensor | None, part: _Part) -> Tensor:
        ctx.shape, ctx.own, ctx.buffer, ctx.part = context.shape, own.shape, buffer, part
        seen = context[part.chat, :, : part.stop].to(own.dtype)
        return torch.cat((seen, own.transpose(0, 1).flatten(1, 2)), dim=1).unsqueeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part, grad = ctx.part, grad[0]
        count, kv, slots, size = ctx.own
        total = ctx.buffer
        if total is None and ctx.needs_input_grad[1]:
            total = grad.new_zeros(ctx.shape)
        if total is not None:
            total[part.chat, :, : part.stop] += grad[:, : part.stop]
        own = grad[:, part.stop :].view(kv, count, slots, size).transpose(0, 1)
        return own, total if ctx.buffer is None else None, None, None
