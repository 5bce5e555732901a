"""What a drafter learns from: tokens and the target's states, made with the target in the loop.

Legend: B chats, S positions (right-padded), A taps, Ht target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from eyas.data.batches import ChatBatches, TokenBatch
from eyas.target import Target


class FeatureBatch(NamedTuple):
    """One batch; a trainer can't tell where it came from."""

    tokens: Tensor  # [B, S]
    loss_mask: Tensor  # [B, S] bool, true at answer tokens, never at padding
    taps: Tensor  # [B, S, A, Ht]
    final: Tensor  # [B, S, Ht] after the target's final norm: what its head reads


class FeatureSource(Protocol):
    """Batches by number; the same number always gives the same batch."""

    def __call__(self, number: int) -> FeatureBatch: ...


def capture(target: Target, batch: TokenBatch, taps: Sequence[int]) -> FeatureBatch:
    """Run the target over a batch, teacher-forced."""
    tokens = batch.tokens.to(target.device)
    traced = target.trace(tokens, batch.lengths.to(target.device), taps)
    return FeatureBatch(tokens, batch.loss_mask.to(target.device), traced.taps, traced.final)


class OnlineSource:
    """The target in the loop: nothing stored, and every epoch costs its passes again."""

    def __init__(self, target: Target, batches: ChatBatches, taps: Sequence[int]) -> None:
        target.check_taps(taps)
        self._target, self._batches, self._taps = target, batches, tuple(taps)

    def __call__(self, number: int) -> FeatureBatch:
        return capture(self._target, self._batches.batch(number), self._taps)
