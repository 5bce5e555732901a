"""The objective of every drafter kind: training-time test against the target's own distribution.

The loss mask belongs to the token that is predicted, so the first token of an answer is trained; the divisor
counts answer tokens that step 0 predicts and is the same for every step; rows whose greedy target token lies outside
the draft vocabulary count like any other. Later steps have fewer rows: no chain starts before the first token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eyas.data.features import FeatureBatch, FeatureSource
from eyas.drafters.network import DraftNetwork
from eyas.errors import DataError
from eyas.train.draft_loss import Scores, Teacher, accept_lengths, score, teach
from eyas.train.loss_config import LossConfig
from eyas.train.metrics import Part
from eyas.train.ttt import unrolled


class Outcome(NamedTuple):
    """One batch as sums. A tuple, so that DDP and FSDP find the loss in what `forward` returns."""

    loss: Tensor  # [] sum over what counts
    weight: float  # how many answer tokens step 0 predicts
    metrics: dict[str, tuple[float, float]]  # name -> sum and count


class DraftLoss(nn.Module):
    """The network with its loss: what DDP or FSDP2 wraps."""

    def __init__(self, network: DraftNetwork, head: Callable[[Tensor], Tensor], vocab_size: int, config: LossConfig):
        super().__init__()
        self.network = network
        self._head, self._vocab_size, self._config = head, vocab_size, config

    def forward(self, batch: FeatureBatch) -> Outcome:
        """Sums over the batch. Autocast is the caller's; the teacher keeps its own precision."""
        ids = self.network.target_ids
        if batch.final is None:
            raise DataError("this objective learns from final states, and the store has top tokens in their place")
        with torch.autocast(batch.tokens.device.type, enabled=False):
            teacher = teach(self._head, batch.final, batch.loss_mask, ids, self._vocab_size)
        taps = batch.taps.to(self.network.dtype)
        states = unrolled(self.network, batch.tokens, taps, self._config.unroll)
        scores = [score(self.network.logits, normed, teacher, step, ids) for step, normed in enumerate(states)]
        loss = torch.stack([s.loss * self._config.decay**step for step, s in enumerate(scores)]).sum()
        return Outcome(loss, len(scores[0].rows), draft_metrics(teacher, scores))


class DraftObjective:
    """Trains `model` on what `source` yields. `core` is what is called and may be wrapped (DDP, FSDP2)."""

    core: nn.Module

    def __init__(
        self,
        network: DraftNetwork,
        head: Callable[[Tensor], Tensor],
        vocab_size: int,
        source: FeatureSource,
        config: LossConfig,
        bf16: bool,
        seed: int = 0,
    ) -> None:
        """`head` maps the target's final states [..., Ht] to its logits [..., V]; `seed` is that of feature noise."""
        self.model = network
        self.core = DraftLoss(network, head, vocab_size, config)
        self._source, self._bf16, self._seed = source, bf16, seed

    def part(self, number: int) -> Part:
        """Loss and metrics of training batch `number`."""
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            batch = self._source(number)  # an online target keeps its own precision
        return self.score(batch)

    def score(self, batch: FeatureBatch) -> Part:
        """Loss and metrics of a given batch, without feature noise; gradients as the caller's grad mode says."""
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self._bf16):
            outcome: Outcome = self.core(batch)
        return Part(outcome.loss, outcome.weight, outcome.metrics)


def draft_metrics(teacher: Teacher, scores: list[Scores]) -> dict[str, tuple[float, float]]:
    """Sums and counts: greedy agreement and sum of min(p, q) by step; the accept length of greedy chains."""
    found: dict[str, tuple[Tensor, int]] = {}
    for step, s in enumerate(scores):
        found[f"accuracy_{step}"] = (s.right.sum(), len(s.rows))
        found[f"overlap_{step}"] = (s.overlap.sum(), len(s.rows))
    lengths = accept_lengths(teacher, scores)
    found["accept_length"] = (lengths.sum(), len(lengths))
    sums = torch.stack([total.float() for total, _ in found.values()]).tolist()  # one transfer for all
    return {name: (total, count) for total, (name, (_, count)) in zip(sums, found.items(), strict=True)}
