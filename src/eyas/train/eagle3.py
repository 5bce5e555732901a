"""The EAGLE-3 objective: training-time test against the target's own distribution.

loss = sum over steps j of decay^j * sum over answer tokens of CE(teacher, drafter) / number of answer tokens,
where the teacher is the softmax of the target's logits over the draft vocabulary alone.

The loss mask belongs to the token that is predicted, so the first token of an answer is trained; the divisor
counts unmasked positions only and is the same for every step; rows whose greedy target token lies outside the
draft vocabulary count like any other. Later steps have fewer rows: no chain starts before the first token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.data.features import FeatureBatch, FeatureSource
from eyas.drafters.eagle3 import Eagle3Module
from eyas.errors import DataError
from eyas.target import Target
from eyas.train.draft_loss import Scores, Teacher, accept_lengths, score, teach
from eyas.train.metrics import Means, Part
from eyas.train.ttt import unrolled


class Eagle3Objective:
    """Trains `model` on what `source` yields; `held_out` are fixed batches for validation."""

    def __init__(
        self,
        model: Eagle3Module,
        target: Target,
        source: FeatureSource,
        held_out: list[FeatureBatch],
        *,
        unroll: int,
        decay: float,
        bf16: bool,
    ) -> None:
        self.model = model
        self._target, self._source, self._held_out = target, source, held_out
        self._unroll, self._decay, self._bf16 = unroll, decay, bf16

    def part(self, number: int) -> Part:
        with torch.autocast(self._target.device.type, enabled=False):  # the teacher keeps its own precision
            batch = self._source(number)
        return self._score(batch)

    def validate(self) -> dict[str, float]:
        means = Means()
        with torch.no_grad(), torch.autocast(self._target.device.type, torch.bfloat16, enabled=self._bf16):
            for batch in self._held_out:
                part = self._score(batch)
                means.add_part(part)
        return means.means()

    def _score(self, batch: FeatureBatch) -> Part:
        ids = self.model.target_ids
        if batch.final is None:
            raise DataError("this objective learns from final states, and the store has top tokens in their place")
        with torch.autocast(self._target.device.type, enabled=False):
            teacher = teach(self._target.head, batch.final, batch.loss_mask, ids, self._target.vocab_size)
        taps = batch.taps.to(self.model.fc.weight.dtype)
        states = unrolled(self.model, batch.tokens, taps, self._unroll)
        scores = [score(self.model.logits, normed, teacher, step, ids) for step, normed in enumerate(states)]
        loss = torch.stack([s.loss * self._decay**step for step, s in enumerate(scores)]).sum()
        return Part(loss, len(scores[0].rows), draft_metrics(teacher, scores))


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
