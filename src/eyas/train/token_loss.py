"""Token losses with their gradients by hand, so that one buffer holds first log q, then the gradient.

With z the drafter's logits, q = softmax(z), p' the target's softmax over the draft vocabulary, c the share of the
target's probability which that vocabulary covers, p = c p':

- ce: -sum p' log q, kl: sum p' log(p' / q);                   d/dz = q - p'
- alpha = sum min(p, q), with s = [q < p]:                     d/dz = q s - q sum(q s)
- lk: -log alpha, floored where alpha is next to nothing;      d/dz = -(d alpha/dz) / alpha
- mixed lk: w KL + (1 - w) (1 - alpha), w a constant

Shapes: m answer tokens of a chunk, K steps, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.train.loss_config import LossConfig
from eyas.train.teacher import Lesson

FLOOR = 1e-12
"""Least alpha whose logarithm is taken: a row without any chance costs 27.6, not infinity."""


class Judged(NamedTuple):
    """How m x K guesses did. `grad` is None where none was asked for."""

    loss: Tensor  # [m, K]
    right: Tensor  # [m, K] bool: the drafter's first choice is the target's
    overlap: Tensor  # [m, K] sum of min(p, q): how often a sampled guess is accepted
    grad: Tensor | None  # [m, K, Vd] of loss, with respect to the logits


def judge(
    logits: Tensor, lesson: Lesson, target_ids: Tensor, config: LossConfig, kl_share: Tensor | None, grad: bool
) -> Judged:
    """logits [m, K, Vd]; kl_share [K] is the w of the mixed loss, None for the others."""
    log_q = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    p, covered = lesson.p.to(log_q.dtype), lesson.covered.to(log_q.dtype)
    ideal = p.unsqueeze(1)  # [m, 1, Vd]
    right = target_ids[log_q.argmax(-1)] == lesson.best.unsqueeze(1)
    distance = -(log_q @ p.unsqueeze(2)).squeeze(2)  # cross entropy [m, K]
    if config.token != "ce":
        distance = distance + torch.special.xlogy(p, p).sum(-1, keepdim=True)
    q = log_q.exp_()
    full = ideal * covered[:, None, None]
    shared = torch.minimum(full, q)
    overlap = shared.sum(-1)
    if config.token != "lk":
        return Judged(distance, right, overlap, q.sub_(ideal) if grad else None)

    if kl_share is None:
        floored = overlap.clamp(min=FLOOR)
        loss, kl_weight, alpha_weight = -floored.log(), None, floored.reciprocal()
    else:
        loss = kl_share * distance + (1 - kl_share) * (1 - overlap)
        kl_weight, alpha_weight = kl_share.unsqueeze(1), (1 - kl_share).expand_as(overlap)
    if not grad:
        return Judged(loss, right, overlap, None)
    short = torch.mul(q, q < full, out=shared)  # the part of q that more would help
    rising = torch.addcmul(-short, q, short.sum(-1, keepdim=True)).mul_(alpha_weight.unsqueeze(2))
    if kl_weight is not None:
        rising += q.sub_(ideal).mul_(kl_weight)
    return Judged(loss, right, overlap, rising)
