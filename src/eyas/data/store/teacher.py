"""The teacher's best tokens, made from final states, a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**24
"""Most logits made at once."""


class TopRows(NamedTuple):
    """`TopTokens` of F single positions."""

    ids: Tensor  # [F, k] int64
    logprobs: Tensor  # [F, k] float32
    tail: Tensor  # [F] float32


@torch.no_grad()
def top_rows(head: Callable[[Tensor], Tensor], final: Tensor, vocab: int, count: int) -> TopRows:
    """Final states [F, Ht] -> the `count` likeliest of `vocab` tokens at each, and the probability of the others."""
    count = min(count, vocab)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in torch.split(final, max(1, CHUNK_ELEMENTS // vocab)):
        logits = head(rows).float()  # [f, V]
        every = logits.logsumexp(-1, keepdim=True)
        best = logits.topk(count)
        logprobs = best.values - every
        found.append((best.indices, logprobs, (1 - logprobs.exp().sum(-1)).clamp_min(0)))
    ids, logprobs, tail = (torch.cat(parts) for parts in zip(*found, strict=True))
    return TopRows(ids, logprobs, tail)
