"""Token losses with hand-written gradients, so that one buffer holds first log q and then the gradient.

With z the drafter's logits, q = softmax(z), p' the target's softmax over the draft vocabulary, c the share of the
target's probability which that vocabulary covers, p = c p':

- ce: -sum p' log q, kl: sum p' log(p' / q);                   d/dz = q - p'
- alpha = sum min(p, q), with s = [q < p]:                     d/dz = q s - q sum(q s)
- lk: -log alpha, with alpha at least FLOOR;                   d/dz = -(d alpha/dz) / alpha
- l1: 0.1 ce + 0.9 sum |p - q|, the latter being 2 - 2 alpha
- mixed lk: w KL + (1 - w) (1 - alpha), w a constant

The teacher's distribution comes from the target's head or from stored top tokens, also a chunk at a time.

Shapes: B chats, S positions, M answer tokens, m of a chunk, K steps, V / Vd full / draft vocabulary, k stored
candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.data.features import FeatureBatch
from eyas.errors import DataError
from eyas.train.loss.config import LossConfig

_L1_CE = 0.1
"""The share of cross entropy in the loss `l1`."""
FLOOR = 1e-12
"""The least alpha whose logarithm is taken, so that a hopeless row costs 27.6 instead of infinity."""


class GuessScores(NamedTuple):
    """Loss and statistics of m x K guesses; `grad` is None if it wasn't requested."""

    loss: Tensor  # [m, K]
    right: Tensor  # [m, K] bool: the drafter's first choice is the target's
    overlap: Tensor  # [m, K] sum of min(p, q): how often a sampled guess is accepted
    grad: Tensor | None  # [m, K, Vd] of loss, with respect to the logits


def score_guesses(
    logits: Tensor, lesson: TeacherOutput, target_ids: Tensor, config: LossConfig, kl_share: Tensor | None, grad: bool
) -> GuessScores:
    """Score logits [m, K, Vd] against the teacher; kl_share [K] is w of the mixed loss, None for other losses."""
    log_q = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    p, covered = lesson.p.to(log_q.dtype), lesson.covered.to(log_q.dtype)
    ideal = p.unsqueeze(1)  # [m, 1, Vd]
    right = target_ids[log_q.argmax(-1)] == lesson.best.unsqueeze(1)
    distance = -(log_q @ p.unsqueeze(2)).squeeze(2)  # cross entropy [m, K]
    if config.token not in ("ce", "l1"):
        distance = distance + torch.special.xlogy(p, p).sum(-1, keepdim=True)
    q = log_q.exp_()
    full = ideal * covered[:, None, None]
    shared = torch.minimum(full, q)
    overlap = shared.sum(-1)
    if config.token in ("ce", "kl"):
        return GuessScores(distance, right, overlap, q.sub_(ideal) if grad else None)

    if config.token == "l1":
        loss = _L1_CE * distance + (1 - _L1_CE) * 2 * (1 - overlap)
        kl_weight, alpha_weight = overlap.new_full((), _L1_CE), torch.full_like(overlap, 2 * (1 - _L1_CE))
    elif kl_share is None:
        floored = overlap.clamp(min=FLOOR)
        loss, kl_weight, alpha_weight = -floored.log(), None, floored.reciprocal()
    else:
        loss = kl_share * distance + (1 - kl_share) * (1 - overlap)
        kl_weight, alpha_weight = kl_share.unsqueeze(1), (1 - kl_share).expand_as(overlap)
    if not grad:
        return GuessScores(loss, right, overlap, None)
    short = torch.mul(q, q < full, out=shared)  # q where it is below p
    rising = torch.addcmul(-short, q, short.sum(-1, keepdim=True)).mul_(alpha_weight.unsqueeze(2))
    if kl_weight is not None:
        rising += q.sub_(ideal).mul_(kl_weight)
    return GuessScores(loss, right, overlap, rising)


class TeacherOutput(NamedTuple):
    """The target's distribution at m answer tokens."""

    p: Tensor  # [m, Vd] softmax over the draft vocabulary alone
    covered: Tensor  # [m] share of the full softmax that the draft vocabulary holds
    best: Tensor  # [m] int64, the target's own greedy token (a full-vocabulary id)


Teacher = Callable[[Tensor], TeacherOutput]
"""Maps indices into B * S [m], of the positions whose states predict the tokens, to the target's distribution."""


def teacher_of(batch: FeatureBatch, head: Callable[[Tensor], Tensor], target_ids: Tensor, vocab_size: int) -> Teacher:
    """The teacher for a batch: final states through the target's head, or stored top tokens; target_ids [Vd].

    Raises DataError for a batch that has neither or both.
    """
    if (batch.final is None) == (batch.top is None):
        raise DataError("a feature batch must hold either final states or top tokens, not both or neither")
    kind = batch.tokens.device.type
    if batch.final is not None:
        finals = batch.final.flatten(0, 1)

        @torch.no_grad()
        def from_head(indices: Tensor) -> TeacherOutput:
            with torch.autocast(kind, enabled=False):  # the teacher runs in its own precision
                logits = head(finals.index_select(0, indices))  # [m, V]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            kept = logits.index_select(1, target_ids)
            inside = kept.logsumexp(-1, keepdim=True)
            covered = (inside.squeeze(1) - logits.logsumexp(-1)).exp()
            return TeacherOutput(kept.sub_(inside).exp_(), covered, logits.argmax(-1))

        return from_head

    assert batch.top is not None
    ids, logprobs = batch.top.ids.flatten(0, 1), batch.top.logprobs.flatten(0, 1)
    tail = batch.top.tail.flatten()
    draft_ids = torch.full((vocab_size,), -1, device=target_ids.device)
    draft_ids[target_ids] = torch.arange(len(target_ids), device=target_ids.device)

    @torch.no_grad()
    def from_top(indices: Tensor) -> TeacherOutput:
        """Spread the probability of the other V - k tokens evenly, since only their total is stored."""
        best, logs = ids.index_select(0, indices), logprobs.index_select(0, indices).float()  # [m, k]
        others = max(vocab_size - ids.shape[1], 1)
        full = (tail.index_select(0, indices) / others).unsqueeze(1).repeat(1, len(target_ids) + 1)
        at = draft_ids[best]  # tokens outside the draft vocabulary go to a last column that is dropped
        full.scatter_(1, at.where(at >= 0, len(target_ids)), logs.exp())
        kept = full[:, :-1]
        covered = kept.sum(-1)
        p = kept / covered.clamp(min=torch.finfo(kept.dtype).tiny).unsqueeze(1)
        return TeacherOutput(p, covered, best.gather(1, logs.argmax(-1, keepdim=True)).squeeze(1))

    return from_top
