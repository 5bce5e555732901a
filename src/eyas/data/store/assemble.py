"""Stored rows, laid end to end, become a padded batch.

Bytes move as stored, and are decoded on the device. Legend: B chats, S positions, A taps stored, Ht target hidden,
M positions filled, k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.data.batches import TokenBatch
from eyas.data.features import FeatureBatch, TopTokens, taught
from eyas.data.store.encoding import Encoded, decode_states
from eyas.data.store.layout import Layout
from eyas.data.store.shard import StoredRow


def assembled(
    rows: Sequence[StoredRow | None], batch: TokenBatch, layout: Layout, dtype: torch.dtype, device: torch.device
) -> FeatureBatch:
    """The features of a batch, row by row; None leaves a row's features zeros. Stored rows may go on past the batch's.

    Taps are those stored, and after them the final state of every position if that is kept.
    """
    there = torch.tensor([row is not None for row in rows]).unsqueeze(1)  # [B, 1]
    real = (torch.arange(batch.tokens.shape[1]) < batch.lengths.unsqueeze(1)) & there  # [B, S]
    teaching = taught(batch.loss_mask) & there  # [B, S]
    found = [row for row in rows if row is not None]
    counts = real.sum(1)[there.squeeze(1)].tolist()
    asked = teaching.sum(1)[there.squeeze(1)].tolist()

    taps = _states([row.taps for row in found], counts, real, (len(layout.taps), layout.hidden), dtype, device)
    final: Tensor | None = None
    top: TopTokens | None = None
    if layout.final == "all":
        final = _states([row.final for row in found], counts, real, (layout.hidden,), dtype, device)
        taps = torch.cat([taps, final.unsqueeze(2)], dim=2)
        final.masked_fill_(~teaching.to(device).unsqueeze(2), 0)
    elif layout.final == "answers":
        final = _states([row.final for row in found], asked, teaching, (layout.hidden,), dtype, device)
    else:
        kept = [[part[:n] for part in row.top or ()] for row, n in zip(found, asked, strict=True)]
        ids, logprobs, tail = (torch.cat(parts) for parts in zip(*kept, strict=True))
        where = teaching.to(device)
        top = TopTokens(
            placed(ids.to(torch.int64).to(device), where),
            placed(logprobs.float().to(device), where),
            placed(tail.to(device), where),
        )
    return FeatureBatch(batch.tokens.to(device), batch.loss_mask.to(device), taps, final, top)


def placed(values: Tensor, where: Tensor) -> Tensor:
    """values [M, ...] at the M true places of where [B, S], zeros elsewhere: [B, S, ...]."""
    out = torch.zeros(*where.shape, *values.shape[1:], dtype=values.dtype, device=values.device)
    out[where] = values
    return out


def _states(
    parts: Sequence[Encoded | None],
    counts: Sequence[int],
    where: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The first `counts` states of each part, decoded, at `where`: [B, S, *shape]."""
    kept = [(part, n) for part, n in zip(parts, counts, strict=True) if part is not None]
    if not kept:
        return torch.zeros(*where.shape, *shape, dtype=dtype, device=device)
    values = torch.cat([part.values[:n].view(torch.uint8) for part, n in kept]).view(kept[0][0].values.dtype)
    exponents = [part.exponents[:n] for part, n in kept if part.exponents is not None]
    encoded = Encoded(values.to(device), torch.cat(exponents).to(device) if exponents else None)
    return placed(decode_states(encoded, dtype), where.to(device))
