"""Feature batches, which drafters learn from: tokens and the target's hidden states.

They are read from a store, or computed with the target in the loop (`OnlineSource`).

Legend: B chats, S positions (right-padded), A taps (aux hidden states), Ht target hidden, k candidates, F positions of
several rows end to end, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.data.tokens.batches import ChatBatches, TokenBatch
from eyas.targets import Target

CHUNK_ELEMENTS = 2**24
"""Maximum number of logits that `top_rows` computes at once."""


class TopTokens(NamedTuple):
    """The teacher's most probable tokens at each position, kept instead of its final states."""

    ids: Tensor  # [B, S, k] int64; without a batch [F, k]
    logprobs: Tensor  # [B, S, k] float32, of the full vocabulary's softmax, in descending order
    tail: Tensor  # [B, S] float32, total probability of all other tokens


class FeatureBatch(NamedTuple):
    """One training batch, in the same form whether it was stored or computed.

    Exactly one of `final` and `top` is given. Position s predicts token s + 1 and is filled only where
    `loss_mask[b, s + 1]` is true; elsewhere both are zeros, and so are taps at padding.
    """

    tokens: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] bool, true at answer tokens, never at padding
    taps: Tensor  # [B, S, A, Ht]
    final: Tensor | None  # [B, S, Ht] after the target's final norm: the input of its head
    top: TopTokens | None = None
    starts: Tensor | None = None  # [B] position of each row's first token in its chat; None: all are 0


class FeatureSource(Protocol):
    """A function from a batch number to a batch; the same number always gives the same batch."""

    def __call__(self, number: int) -> FeatureBatch: ...


def taught(loss_mask: Tensor) -> Tensor:
    """[B, S] bool: positions whose next token is an answer token, the only ones where the teacher is needed."""
    return F.pad(loss_mask[:, 1:], (0, 1))


def trace_batch(target: Target, batch: TokenBatch, taps: Sequence[int]) -> FeatureBatch:
    """Run the target over a batch with teacher forcing and collect its states."""
    tokens = batch.tokens.to(target.device)
    lengths = batch.lengths.to(target.device)
    mask = batch.loss_mask.to(target.device)
    traced = target.trace(tokens, lengths, taps)
    padding = torch.arange(tokens.shape[1], device=target.device) >= lengths.unsqueeze(1)
    states = traced.taps.masked_fill_(padding[:, :, None, None], 0)
    return FeatureBatch(tokens, mask, states, traced.final.masked_fill(~taught(mask).unsqueeze(2), 0))


def trace_members(target: Target, batches: ChatBatches, members: Sequence[int], taps: Sequence[int]) -> FeatureBatch:
    """The features of segments, each computed with everything before it in its chat as context."""
    batch = batches.of(members)
    if not batch.starts.any():
        return trace_batch(target, batch, taps)
    taps_made, final_made = [], []
    for member, start in zip(members, batch.starts.tolist(), strict=True):  # one by one, because chats are long
        made = trace_batch(target, batches.prefix(member), taps)
        assert made.final is not None
        rest = batch.tokens.shape[1] - (made.tokens.shape[1] - start)
        taps_made.append(F.pad(made.taps[0, start:], (0, 0, 0, 0, 0, rest)))
        final_made.append(F.pad(made.final[0, start:], (0, 0, 0, rest)))
    tokens, mask, _, starts = (part.to(target.device) for part in batch)
    return FeatureBatch(tokens, mask, torch.stack(taps_made), torch.stack(final_made), starts=starts)


class OnlineSource:
    """Computes features with the target in the loop; nothing is stored, so every epoch runs the target again."""

    def __init__(self, target: Target, batches: ChatBatches, taps: Sequence[int]) -> None:
        target.check_taps(taps)
        self._target = target
        self._batches = batches
        self._taps = tuple(taps)

    def __call__(self, number: int) -> FeatureBatch:
        return trace_members(self._target, self._batches, self._batches.members(number), self._taps)


@torch.no_grad()
def top_rows(head: Callable[[Tensor], Tensor], final: Tensor, vocab: int, count: int) -> TopTokens:
    """Final states [F, Ht] -> the `count` most probable of `vocab` tokens at each, and the rest's probability."""
    count = min(count, vocab)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in torch.split(final, max(1, CHUNK_ELEMENTS // vocab)):
        logits = head(rows).float()  # [f, V]
        every = logits.logsumexp(-1, keepdim=True)
        best = logits.topk(count)
        logprobs = best.values - every
        found.append((best.indices, logprobs, (1 - logprobs.exp().sum(-1)).clamp_min(0)))
    ids, logprobs, tail = (torch.cat(parts) for parts in zip(*found, strict=True))
    return TopTokens(ids, logprobs, tail)
