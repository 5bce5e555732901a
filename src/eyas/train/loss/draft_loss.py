"""The token loss of all steps, a chunk of answer tokens at a time.

A chunk's teacher is made once for its K guesses; its logits, their gradient and the head's are gone before the next
chunk begins, so the memory doesn't grow with the batch. Gradients are therefore computed in the forward pass (as Liger
does) and only scaled in the backward pass.

Shapes: M answer tokens, m of a chunk, K steps, H width, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eyas.train.loss.config import LossConfig
from eyas.train.loss.token_loss import GuessScores, Teacher, score_guesses
from eyas.train.loss.ttt import ChainRows

CHUNK_ELEMENTS = 2**20
"""Least number of logits made at once."""


class TokenScores(NamedTuple):
    """What the answer tokens' guesses come to."""

    loss: Tensor  # [] summed over tokens and steps, steps weighted
    right: Tensor  # [M, K] bool: the drafter's first choice is the target's
    overlap: Tensor  # [M, K] sum of min(p, q)


@dataclass(frozen=True)
class TokenLoss:
    """Everything but the states: the teacher, the drafter's head, and the loss.

    `head` maps states [..., H] to logits [..., Vd]; `parameters` are all parameters in it that are trained.
    """

    teacher: Teacher
    head: Callable[[Tensor], Tensor]
    parameters: tuple[nn.Parameter, ...]
    target_ids: Tensor  # [Vd]
    vocab_size: int
    config: LossConfig

    def __call__(self, states: list[Tensor], rows: ChainRows) -> TokenScores:
        """states: of each step its rows [., H], in the order of `rows`."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*states, *self.parameters)):
            made: tuple[Tensor, Tensor, Tensor] = _Fused.apply(self, rows, len(states), *states, *self.parameters)  # type: ignore[no-untyped-call]
            return TokenScores(*made)
        return self.run(states, rows, None)

    def run(self, states: list[Tensor], rows: ChainRows, grads: list[Tensor] | None) -> TokenScores:
        """One pass over the chunks (two for the mixed loss); adds to `grads`, of states and parameters, if given."""
        steps, device = len(states), rows.answers.device
        kl_share = None
        if self.config.kl_decay is not None:
            alphas = torch.cat([chunk.judged.overlap for chunk in self._chunks(states, rows, None, False)])  # [M, K]
            there = rows.guesses[:steps].T >= 0
            kl_share = (-self.config.kl_decay * (alphas * there).sum(0) / there.sum(0).clamp(min=1)).exp()
        scale = self.config.token_weight * self.config.decay ** torch.arange(steps, device=device)
        losses, right, overlap = [], [], []
        for chunk in self._chunks(states, rows, kl_share, grads is not None):
            weight = scale * (chunk.at >= 0)  # [m, K]
            losses.append((chunk.judged.loss * weight).sum())
            right.append(chunk.judged.right)
            overlap.append(chunk.judged.overlap)
            if grads is not None:
                assert chunk.judged.grad is not None
                down = chunk.judged.grad.mul_(weight.unsqueeze(2)).to(chunk.logits.dtype)
                found, *own = torch.autograd.grad(chunk.logits, (chunk.states, *self.parameters), down)
                for step, total in enumerate(grads[:steps]):
                    total.index_add_(0, chunk.at[:, step].clamp(min=0), found[:, step].to(total.dtype))
                for total, part in zip(grads[steps:], own, strict=True):
                    total += part
        return TokenScores(torch.stack(losses).sum(), torch.cat(right), torch.cat(overlap))

    def _chunks(self, states: list[Tensor], rows: ChainRows, kl_share: Tensor | None, grad: bool) -> Iterator[_Chunk]:
        """The chunks' guesses, judged; a batch without answer tokens is one empty chunk."""
        steps = len(states)
        budget = max(CHUNK_ELEMENTS, len(self.target_ids) * states[0].shape[-1])  # or as many logits as head weights
        size = max(1, budget // (self.vocab_size + steps * len(self.target_ids)))
        for indices, guesses in zip(
            torch.split(rows.answers, size), torch.split(rows.guesses[:steps], size, dim=1), strict=True
        ):
            at = guesses.T  # [m, K]
            picked = [state.index_select(0, at[:, step].clamp(min=0)) for step, state in enumerate(states)]
            with torch.set_grad_enabled(grad):
                stacked = torch.stack(picked, dim=1).detach().requires_grad_(grad)  # [m, K, H]
                logits = self.head(stacked)  # [m, K, Vd]
            with torch.autocast(indices.device.type, enabled=False):
                judged = score_guesses(
                    logits.detach(), self.teacher(indices), self.target_ids, self.config, kl_share, grad
                )
            yield _Chunk(at, stacked, logits, judged)


class _Chunk(NamedTuple):
    """m answer tokens and their K guesses each."""

    at: Tensor  # [m, K] the guess's row among its step's states, -1 where there is none
    states: Tensor  # [m, K, H]
    logits: Tensor  # [m, K, Vd]
    judged: GuessScores


class _Fused(torch.autograd.Function):
    """Forward does it all; backward scales the gradients it made."""

    @staticmethod
    def forward(
        ctx: Any, loss: TokenLoss, rows: ChainRows, steps: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = [torch.zeros_like(x) for x in tensors]
        scores = loss.run(list(tensors[:steps]), rows, grads)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(scores.right, scores.overlap)
        return scores.loss, scores.right, scores.overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(made * grad for made in ctx.saved_tensors)


# What validation reads off a batch of guesses: agreement by step, and how far a greedy chain would get.
#
# Shapes: B chats, S positions, M answer tokens, K steps, N rows that step 0 is judged on.


Sums = dict[str, tuple[float, float]]
"""name -> sum and count"""


def draft_metrics(rows: ChainRows, right: Tensor, overlap: Tensor) -> Sums:
    """`accuracy_j` greedy agreement, `overlap_j` sum of min(p, q), `accept_length` of greedy chains.

    right [M, K] bool, overlap [M, K]; fewer columns where no row was left to guess. One transfer from the device.
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


def accept_lengths(rows: ChainRows, right: Tensor) -> Tensor:
    """[N] tokens a greedy round would emit from each row step 0 is judged on: its unbroken right guesses, and one.

    A chain ends where the answer ends, as decoding would. right [M, K].
    """
    positions = rows.counts[0]  # B * S
    starts = rows.answers - 1
    alive = torch.ones(positions, dtype=torch.bool, device=right.device)
    length = torch.ones(positions, dtype=torch.int64, device=right.device)
    for step in range(right.shape[1]):
        hit = torch.zeros(positions + 1, dtype=torch.bool, device=right.device)
        there = rows.guesses[step] >= 0
        hit[torch.where(there, starts - step, positions)] = right[:, step]  # guesses that aren't go past the end
        alive &= hit[:positions]
        length += alive
    return length[starts[rows.guesses[0] >= 0]]
