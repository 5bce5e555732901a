"""What a drafter learns from: tokens and the target's states, stored, or made with the target in the loop.

Legend: B chats, S positions (right-padded), A taps, Ht target hidden, k candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.data.tokens.batches import ChatBatches, TokenBatch
from eyas.targets import Target


class TopTokens(NamedTuple):
    """The teacher's best tokens at each position, in place of the state its whole distribution is made from."""

    ids: Tensor  # [B, S, k] int64
    logprobs: Tensor  # [B, S, k] float32, of the full vocabulary's softmax, falling
    tail: Tensor  # [B, S] float32, probability of all other tokens together


class FeatureBatch(NamedTuple):
    """One batch; a trainer can't tell where it came from.

    Exactly one of `final` and `top` is given. Position s speaks of token s + 1, and only where `loss_mask[b, s + 1]`
    is true; elsewhere both are zeros, as are taps at padding.
    """

    tokens: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] bool, true at answer tokens, never at padding
    taps: Tensor  # [B, S, A, Ht]
    final: Tensor | None  # [B, S, Ht] after the target's final norm: what its head reads
    top: TopTokens | None = None


class FeatureSource(Protocol):
    """Batches by number; the same number always gives the same batch."""

    def __call__(self, number: int) -> FeatureBatch: ...


def taught(loss_mask: Tensor) -> Tensor:
    """[B, S] bool: positions whose next token is an answer token, the only ones where the teacher is asked."""
    return torch.nn.functional.pad(loss_mask[:, 1:], (0, 1))


def trace_batch(target: Target, batch: TokenBatch, taps: Sequence[int]) -> FeatureBatch:
    """Run the target over a batch, teacher-forced."""
    tokens, lengths = batch.tokens.to(target.device), batch.lengths.to(target.device)
    mask = batch.loss_mask.to(target.device)
    traced = target.trace(tokens, lengths, taps)
    padding = torch.arange(tokens.shape[1], device=target.device) >= lengths.unsqueeze(1)
    states = traced.taps.masked_fill_(padding[:, :, None, None], 0)
    return FeatureBatch(tokens, mask, states, traced.final.masked_fill(~taught(mask).unsqueeze(2), 0))


class OnlineSource:
    """The target in the loop: nothing stored, and every epoch costs its passes again."""

    def __init__(self, target: Target, batches: ChatBatches, taps: Sequence[int]) -> None:
        target.check_taps(taps)
        self._target, self._batches, self._taps = target, batches, tuple(taps)

    def __call__(self, number: int) -> FeatureBatch:
        return trace_batch(self._target, self._batches.batch(number), self._taps)


# The teacher's best tokens, made from final states, a few rows of logits at a time.


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
