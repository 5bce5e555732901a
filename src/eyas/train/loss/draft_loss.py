"""The token loss of all steps, computed one chunk of answer tokens at a time, and the validation metrics.

The teacher's output for a chunk is computed once and shared by its K guesses. Its logits, their gradient and the head's
are freed before the next chunk, so memory doesn't grow with the batch. Gradients are therefore computed in the forward
pass (as Liger does) and only scaled in the backward pass. If most guesses are missing, as with sampled anchors, a chunk
holds single guesses instead of answer tokens with K guesses each; every guess then counts as a token with k = 1.

Token losses have hand-written gradients, so that one buffer holds first log q and then the gradient.

With z the drafter's logits, q = softmax(z), p' the target's softmax over the draft vocabulary, c the share of the
target's probability that the draft vocabulary covers, p = c p':

- ce: -sum p' log q, kl: sum p' log(p' / q);                   d/dz = q - p'
- alpha = sum min(p, q), with s = [q < p]:                     d/dz = q s - q sum(q s)
- lk: -log alpha, with alpha at least FLOOR;                   d/dz = -(d alpha/dz) / alpha
- l1: 0.1 ce + 0.9 sum |p - q|, where sum |p - q| = 2 - 2 alpha
- mixed lk: w KL + (1 - w) (1 - alpha), w a constant

The teacher's distribution comes from the target's head or from stored top tokens, also one chunk at a time.

Shapes: B chats, S positions, M answer tokens, m of a chunk, K steps, k guesses of a token in a chunk (in `teacher_of`:
stored candidates), H width, V / Vd full / draft vocabulary, N rows that step 0 is scored on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eyas.data.features import FeatureBatch
from eyas.drafters.network import DraftNetwork
from eyas.errors import DataError
from eyas.train.loss.config import LossConfig
from eyas.train.loss.ttt import ChainRows
from eyas.types import CONTEXT_BUCKETS

_L1_CE = 0.1
"""The share of cross entropy in the loss `l1`."""
FLOOR = 1e-12
"""Lower limit of alpha before its logarithm is taken, so that a row without overlap costs 27.6 instead of infinity."""


class GuessScores(NamedTuple):
    """Loss and statistics of m x K guesses; `grad` is None if it wasn't requested."""

    loss: Tensor  # [m, K]
    right: Tensor  # [m, K] bool: the drafter's first choice is the target's
    overlap: Tensor  # [m, K] sum of min(p, q): the probability that a sampled guess is accepted
    chance: Tensor | None  # [m, K] the drafter's probability of the target's first choice, for D-PACE
    grad: Tensor | None  # [m, K, Vd] of loss, with respect to the logits


def score_guesses(
    logits: Tensor, lesson: TeacherOutput, target_ids: Tensor, config: LossConfig, kl_share: Tensor | None, grad: bool
) -> GuessScores:
    """Score logits [m, K, Vd] against the teacher; kl_share [K] is w of the mixed loss, None for other losses."""
    log_q = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    p = lesson.p.to(log_q.dtype)
    covered = lesson.covered.to(log_q.dtype)
    ideal = p.unsqueeze(1)  # [m, 1, Vd]
    right = target_ids[log_q.argmax(-1)] == lesson.best.unsqueeze(1)
    distance = -(log_q @ p.unsqueeze(2)).squeeze(2)  # cross entropy [m, K]
    if config.token not in ("ce", "l1"):
        distance = distance + torch.special.xlogy(p, p).sum(-1, keepdim=True)
    q = log_q.exp_()
    full = ideal * covered[:, None, None]
    shared = torch.minimum(full, q)
    overlap = shared.sum(-1)
    chance = None
    if config.dpace is not None:
        chosen = (target_ids == lesson.best.unsqueeze(1)).to(q.dtype)  # [m, Vd]
        chance = (q @ chosen.unsqueeze(2)).squeeze(2)
    if config.token in ("ce", "kl"):
        return GuessScores(distance, right, overlap, chance, q.sub_(ideal) if grad else None)

    if config.token == "l1":
        loss = _L1_CE * distance + (1 - _L1_CE) * 2 * (1 - overlap)
        kl_weight = overlap.new_full((), _L1_CE)
        alpha_weight = torch.full_like(overlap, 2 * (1 - _L1_CE))
    elif kl_share is None:
        floored = overlap.clamp(min=FLOOR)
        loss = -floored.log()
        kl_weight = None
        alpha_weight = floored.reciprocal()
    else:
        loss = kl_share * distance + (1 - kl_share) * (1 - overlap)
        kl_weight = kl_share.unsqueeze(1)
        alpha_weight = (1 - kl_share).expand_as(overlap)
    if not grad:
        return GuessScores(loss, right, overlap, chance, None)
    short = torch.mul(q, q < full, out=shared)  # q where it is below p
    rising = torch.addcmul(-short, q, short.sum(-1, keepdim=True)).mul_(alpha_weight.unsqueeze(2))
    if kl_weight is not None:
        rising += q.sub_(ideal).mul_(kl_weight)
    return GuessScores(loss, right, overlap, chance, rising)


class TeacherOutput(NamedTuple):
    """The target's distribution at m answer tokens."""

    p: Tensor  # [m, Vd] softmax over the draft vocabulary alone
    covered: Tensor  # [m] share of the full softmax that the draft vocabulary covers
    best: Tensor  # [m] int64, the target's own greedy token (a full-vocabulary id)


Teacher = Callable[[Tensor], TeacherOutput]
"""Maps the positions whose states predict the tokens, as indices [m] into B * S, to the target's distributions."""


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
    ids = batch.top.ids.flatten(0, 1)
    logprobs = batch.top.logprobs.flatten(0, 1)
    tail = batch.top.tail.flatten()
    draft_ids = torch.full((vocab_size,), -1, device=target_ids.device)
    draft_ids[target_ids] = torch.arange(len(target_ids), device=target_ids.device)

    @torch.no_grad()
    def from_top(indices: Tensor) -> TeacherOutput:
        """Spread the probability of the other V - k tokens evenly, since only their total is stored."""
        # [m, k]
        best = ids.index_select(0, indices)
        logs = logprobs.index_select(0, indices).float()
        others = max(vocab_size - ids.shape[1], 1)
        full = (tail.index_select(0, indices) / others).unsqueeze(1).repeat(1, len(target_ids) + 1)
        at = draft_ids[best]  # tokens outside the draft vocabulary go to a last column that is dropped
        full.scatter_(1, at.where(at >= 0, len(target_ids)), logs.exp())
        kept = full[:, :-1]
        covered = kept.sum(-1)
        p = kept / covered.clamp(min=torch.finfo(kept.dtype).tiny).unsqueeze(1)
        return TeacherOutput(p, covered, best.gather(1, logs.argmax(-1, keepdim=True)).squeeze(1))

    return from_top


CHUNK_ELEMENTS = 2**20
"""Logits in a chunk on a CPU, or as many as the head has weights if that is more."""
LAUNCHES = 64
"""Factor by which accelerators compute more at a time, so that launching kernels doesn't dominate."""
_SPARSE = 0.5
"""If less than this share of guesses exists, only existing ones are computed, each with its own teacher row."""

Sums = dict[str, tuple[float, float]]
"""Name of a metric -> its sum and count."""


class TokenScores(NamedTuple):
    """The loss of a batch and how its guesses compare with the target."""

    loss: Tensor  # [] weighted sum over tokens and steps
    right: Tensor  # [M, K] bool: the drafter's first choice is the target's
    overlap: Tensor  # [M, K] sum of min(p, q)
    by_token: Tensor  # [M] each token's share of the loss


@dataclass(frozen=True)
class TokenLoss:
    """The token loss as a function of the drafter's states: teacher, drafter's head and settings.

    `head` maps states [..., H] to logits [..., Vd]; `parameters` are its trained parameters.
    """

    teacher: Teacher
    head: Callable[[Tensor], Tensor]
    parameters: tuple[nn.Parameter, ...]
    target_ids: Tensor  # [Vd]
    vocab_size: int
    config: LossConfig

    def __call__(self, states: list[Tensor], rows: ChainRows) -> TokenScores:
        """Score the states of each step, [rows of the step, H], in the order of `rows`."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*states, *self.parameters)):
            made: tuple[Tensor, Tensor, Tensor, Tensor] = _Fused.apply(
                self, rows, len(states), *states, *self.parameters
            )  # type: ignore[no-untyped-call]
            return TokenScores(*made)
        return self.run(Guesses.of(states), rows, None)

    def run(self, states: Guesses, rows: ChainRows, grads: list[Tensor] | None) -> TokenScores:
        """Run over all chunks, adding to `grads`: one for all states, one per parameter.

        The mixed loss and D-PACE first run over them once more, for their weights.
        """
        steps = len(states.sizes)
        device = rows.answers.device
        kl_share = None
        there = rows.guesses[:steps].T >= 0
        if self.config.kl_decay is not None:
            alphas = torch.cat([chunk.judged.overlap for chunk in self._chunks(states, rows, None, False)])  # [M, K]
            kl_share = (-self.config.kl_decay * (alphas * there).sum(0) / there.sum(0).clamp(min=1)).exp()
        scale = self.config.token_weight * self.config.decay ** torch.arange(steps, device=device)
        scale = scale.expand(there.shape)  # [M, K]
        if self.config.dpace is not None:
            scale = scale * self._dpace_weights(states, rows, there, self.config.dpace)
        shape = (len(rows.answers), steps)
        precise = torch.promote_types(states.flat.dtype, torch.float32)
        right = torch.zeros(shape, dtype=torch.bool, device=device)
        overlap = torch.zeros(shape, dtype=precise, device=device)
        by_token = torch.zeros(shape[:1], dtype=precise, device=device)
        losses = []
        for chunk in self._chunks(states, rows, kl_share, grads is not None):
            weight = scale[chunk.tokens, chunk.steps] * chunk.there  # [m, k]
            weighted = chunk.judged.loss * weight
            losses.append(weighted.sum())
            by_token.index_add_(0, chunk.tokens.squeeze(1), weighted.sum(1).to(precise))
            right[chunk.tokens, chunk.steps] = chunk.judged.right
            overlap[chunk.tokens, chunk.steps] = chunk.judged.overlap.to(precise)
            if grads is not None:
                assert chunk.judged.grad is not None
                down = chunk.judged.grad.mul_(weight.unsqueeze(2)).to(chunk.logits.dtype)
                found, *own = torch.autograd.grad(chunk.logits, (chunk.states, *self.parameters), down)
                grads[0].index_add_(0, chunk.at.flatten(), found.flatten(0, 1))
                for total, part in zip(grads[1:], own, strict=True):
                    total += part
        return TokenScores(torch.stack(losses).sum(), right, overlap, by_token)

    def _dpace_weights(self, states: Guesses, rows: ChainRows, there: Tensor, alpha: float) -> Tensor:
        """[M, K] the weights of the guesses that are `there` [M, K]."""
        chances = torch.zeros(there.shape, dtype=torch.float32, device=there.device)
        for chunk in self._chunks(states, rows, None, False):
            assert chunk.judged.chance is not None
            chances[chunk.tokens, chunk.steps] = chunk.judged.chance.to(chances.dtype)
        return dpace_weights(chances, rows, there, alpha)

    def _chunks(self, states: Guesses, rows: ChainRows, kl_share: Tensor | None, grad: bool) -> Iterator[_Chunk]:
        """The chunks with their guesses scored; a batch without answer tokens is a single empty chunk."""
        steps = len(states.sizes)
        device = rows.answers.device
        there = rows.guesses[:steps].T >= 0  # [M, K]
        few = self.config.kl_decay is None and bool(there.sum() < _SPARSE * there.numel())
        if few:
            tokens, which = (index.unsqueeze(1) for index in there.nonzero(as_tuple=True))  # [guesses, 1]
        else:
            tokens = torch.arange(len(there), device=device).unsqueeze(1)
            which = torch.arange(steps, device=device)
        head = len(self.target_ids) * states.flat.shape[-1]  # or as many logits as the head has weights
        budget = max(at_once(CHUNK_ELEMENTS, device), head)
        size = max(1, budget // (self.vocab_size + (1 if few else steps) * len(self.target_ids)))
        sizes = torch.tensor(states.sizes, device=device)
        first = sizes.cumsum(0) - sizes
        parts = torch.split(tokens, size)
        steps_of = torch.split(which, size) if few else [which.unsqueeze(0)] * len(parts)
        for of_chunk, of_steps in zip(parts, steps_of, strict=True):
            guess = rows.guesses[of_steps, of_chunk]  # [m, k]
            at = guess.clamp(min=0) + first[of_steps]
            with torch.set_grad_enabled(grad):
                stacked = states.flat[at].detach().requires_grad_(grad)  # [m, k, H]
                logits = self.head(stacked)  # [m, k, Vd]
            answers = rows.answers[of_chunk.squeeze(1)]
            rows_of = None
            if few:  # several guesses of one token
                answers, rows_of = torch.unique_consecutive(answers, return_inverse=True)
            lesson = self.teacher(answers)
            if rows_of is not None:
                lesson = TeacherOutput(*(part.index_select(0, rows_of) for part in lesson))
            with torch.autocast(device.type, enabled=False):
                judged = score_guesses(logits.detach(), lesson, self.target_ids, self.config, kl_share, grad)
            yield _Chunk(of_chunk, of_steps, guess >= 0, at, stacked, logits, judged)


def dpace_weights(chances: Tensor, rows: ChainRows, there: Tensor, alpha: float) -> Tensor:
    """D-PACE's weights [M, K] of guesses that are right with these `chances` [M, K]; 0 where none is `there` [M, K].

    With s = (1 - alpha) * chance + alpha, guess j of a chain weighs the sum over its guesses m >= j of s_0 * ... * s_m.
    A guess that is missing, because its token isn't in an answer, is left out of products and sums.
    """
    tokens, steps = there.nonzero(as_tuple=True)
    chains = rows.answers[tokens] - 1 - steps  # the row from which each guess's chain starts, as in `accept_lengths`
    sure = chances.new_ones(rows.counts[0], there.shape[1])
    sure[chains, steps] = (1 - alpha) * chances[tokens, steps] + alpha
    reached = torch.zeros_like(sure)
    reached[chains, steps] = sure.cumprod(1)[chains, steps]
    weights = torch.zeros_like(chances)
    weights[tokens, steps] = reached.flip(1).cumsum(1).flip(1)[chains, steps]
    return weights


def at_once(size: int, device: torch.device) -> int:
    """The amount to compute at a time on `device`, given the amount `size` for a CPU."""
    return size if device.type == "cpu" else size * LAUNCHES


def head_parameters(network: DraftNetwork) -> tuple[nn.Parameter, ...]:
    """The trained parameters of `network.logits`; empty if the head is the target's."""
    return tuple(p for head in network.heads for p in head.parameters() if p.requires_grad)


class Guesses(NamedTuple):
    """The states of all steps' guesses."""

    flat: Tensor  # [rows of all steps, H]
    sizes: list[int]
    """The number of rows of each step."""

    @classmethod
    def of(cls, states: Sequence[Tensor]) -> Guesses:
        """The states of each step, [rows of the step, H]."""
        return cls(torch.cat(list(states)), [len(state) for state in states])


class _Chunk(NamedTuple):
    """m answer tokens with k guesses each."""

    tokens: Tensor  # [m, 1] which of the M answer tokens
    steps: Tensor  # [m or 1, k] the guesses' steps
    there: Tensor  # [m, k] bool: whether there is such a guess
    at: Tensor  # [m, k] the guess's row among the states of all steps; any row of its step if there is none
    states: Tensor  # [m, k, H]
    logits: Tensor  # [m, k, Vd]
    judged: GuessScores


class _Fused(torch.autograd.Function):
    """Computes loss and gradients in the forward pass; the backward pass only scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any, loss: TokenLoss, rows: ChainRows, steps: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        guesses = Guesses.of(tensors[:steps])
        grads = [torch.zeros_like(x) for x in (guesses.flat, *tensors[steps:])]
        scores = loss.run(guesses, rows, grads)
        ctx.save_for_backward(*torch.split(grads[0], guesses.sizes), *grads[1:])
        ctx.mark_non_differentiable(scores.right, scores.overlap, scores.by_token)
        return scores.loss, scores.right, scores.overlap, scores.by_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(made * grad for made in ctx.saved_tensors)


def draft_metrics(rows: ChainRows, right: Tensor, overlap: Tensor) -> Sums:
    """The metrics of a batch: greedy agreement `accuracy_j` and `overlap_j` of each step j, and `accept_length`.

    right [M, K] bool, overlap [M, K]; both have fewer columns if later steps had no rows. Syncs with the device once.
    """
    steps = right.shape[1]
    there = rows.guesses[:steps].T >= 0
    lengths = accept_lengths(rows, right)
    sums = torch.cat(
        [(right & there).sum(0).double(), (overlap * there).sum(0).double(), there.sum(0), lengths.sum()[None].double()]
    ).tolist()
    found: Sums = {f"{name}_{step}": (0.0, 0.0) for step in range(len(rows.counts)) for name in ("accuracy", "overlap")}
    for step in range(steps):
        count = sums[2 * steps + step]
        found[f"accuracy_{step}"] = (sums[step], count)
        found[f"overlap_{step}"] = (sums[steps + step], count)
    return found | {"accept_length": (sums[-1], len(lengths))}


def context_metrics(rows: ChainRows, scores: TokenScores, starts: Tensor) -> Sums:
    """`loss`, `accuracy` (of step 0) and `accept_length` by context: the tokens of the chat before the one predicted.

    `starts` [B]: where the rows begin in their chats. Syncs with the device once.
    """
    width = rows.counts[0] // len(starts)
    there = rows.guesses[0] >= 0
    before = starts[rows.answers // width] + rows.answers % width + 1  # [M]
    edges = torch.tensor([1024 << i for i in range(len(CONTEXT_BUCKETS) - 1)], device=before.device)
    bucket = torch.bucketize(before, edges, right=True)
    lengths = torch.zeros_like(scores.by_token, dtype=torch.float64)
    lengths[there] = accept_lengths(rows, scores.right)
    values = torch.stack((there, scores.by_token, scores.right[:, 0] & there, lengths)).double()  # [4, M]
    sums = values.new_zeros(4, len(CONTEXT_BUCKETS)).index_add_(1, bucket, values).tolist()
    return {
        f"{name}_{where}": (total, count)
        for name, totals in zip(("loss", "accuracy", "accept_length"), sums[1:], strict=True)
        for where, total, count in zip(CONTEXT_BUCKETS, totals, sums[0], strict=True)
    }


def accept_lengths(rows: ChainRows, right: Tensor) -> Tensor:
    """[N] tokens that a greedy round would emit from each row: its right guesses up to the first wrong one, plus one.

    A chain ends with the answer, as decoding would. If chains are sampled, lengths are right on average. right [M, K].
    """
    positions = rows.counts[0]  # B * S
    starts = rows.answers - 1
    alive = torch.ones(positions, dtype=torch.bool, device=right.device)
    length = torch.ones(positions, dtype=torch.float64, device=right.device)
    for step in range(right.shape[1]):
        hit = torch.zeros(positions + 1, dtype=torch.bool, device=right.device)
        there = rows.guesses[step] >= 0
        hit[torch.where(there, starts - step, positions)] = right[:, step]  # missing guesses write to the extra entry
        alive &= hit[:positions]
        if rows.shares is None:
            length += alive
        elif rows.shares[step]:  # sampled chains stand for the others
            length += alive / rows.shares[step]
    return length[starts[rows.guesses[0] >= 0]]
