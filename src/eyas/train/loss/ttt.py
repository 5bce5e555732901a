"""Training-time test: the drafter is trained on its own output, as it is used in decoding.

Step 0 is the drafter after a commit: pair (target state at i, token i + 1) at RoPE position i predicts token
i + 2. Step j feeds token i + 1 + j and the drafter's own output of step j - 1 (gradients flow through), at
position i + j, and predicts token i + 2 + j. So row i over all steps is the chain of guesses that decoding
makes after committing pair i: it attends to the true pairs 0..i and its own guesses, never to another row's.

Medusa's heads all guess from the true state, so step j is head j (`_heads`).

Step 0 computes every position, since later rows attend to its keys. A later step computes only rows whose chain, from
that step on, still predicts an answer token: prompt rows and rows past the last answer are left out.

Shapes: B chats, S positions, A taps, Ht target hidden, H draft hidden, K steps, M answer tokens, R rows of later steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.heads import HeadsNetwork
from eyas.drafters.network import DraftNetwork
from eyas.train.loss.chain_attention import ChainAttention


def unrolled(network: DraftNetwork, tokens: Tensor, taps: Tensor, rows: ChainRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (state fed back, state the head reads) of each step's rows, both [rows.counts[step], H].

    tokens [B, S], taps [B, S, A, Ht]. Step 0 has all B * S rows, later steps those of `rows` in one sequence, whatever
    their chat. Stops early when no row is left.
    """
    if isinstance(network, HeadsNetwork):
        yield from _heads(network, taps, rows)
        return
    batch, width = tokens.shape
    positions = torch.arange(width, device=tokens.device).expand(batch, width)
    attention = ChainAttention(rows.indices)
    hidden = network.fuse(taps).to(taps.dtype)  # the residual stream keeps its precision under autocast
    last = torch.nn.functional.pad(tokens[:, 1:], (0, 1))  # a chat's last pair has no next token and no loss
    fed, normed = network.step(last, hidden, positions, attention)
    yield fed.flatten(0, 1), normed.flatten(0, 1)
    flat, at = tokens.flatten(), (rows.indices % width).unsqueeze(0)
    fed = fed.flatten(0, 1).index_select(0, rows.indices).unsqueeze(0)
    for step, count in enumerate(rows.counts[1:], start=1):
        if not count:
            return
        fed, normed = network.step(
            flat[rows.indices[:count] + 1 + step].unsqueeze(0), fed[:, :count], at[:, :count] + step, attention
        )
        yield fed[0], normed[0]


def _heads(network: HeadsNetwork, taps: Tensor, rows: ChainRows) -> Iterator[tuple[Tensor, Tensor]]:
    """The steps of heads that guess from the true state alone: step j is head j, and nothing is fed back."""
    states = network.fuse(taps).to(taps.dtype).flatten(0, 1)  # [B * S, H]
    for step, count in enumerate(rows.counts):
        # where no row is left one is run all the same: every process needs gradients of every head
        indices = rows.indices[:count] if count else rows.indices.new_zeros(1)
        guessed = network.guess(states.index_select(0, indices) if step else states, step)
        yield guessed, guessed


@dataclass(frozen=True)
class ChainRows:
    """The rows that each step computes, and the guesses of each answer token.

    Rows with the longest chains come first, so the rows of a later step are the first `counts[step]` of `indices`.
    """

    indices: Tensor  # [R] int64: rows as indices into B * S
    counts: list[int]  # rows of each step: B * S for step 0, then non-increasing
    answers: Tensor  # [M] int64: index into B * S of the state that predicts the token, one before the token's own
    guesses: Tensor  # [K, M] int64: the row of the token's guess among the step's rows; -1 if no chain starts so early


def chain_rows(loss_mask: Tensor, steps: int) -> ChainRows:
    """The rows of a batch; loss_mask [B, S] is true at answer tokens. Syncs with the device twice."""
    batch, width = loss_mask.shape
    device = loss_mask.device
    ahead = F.pad(loss_mask, (0, steps + 1))
    life = torch.zeros(batch, width, dtype=torch.int64, device=device)  # last step that predicts an answer token
    for step in range(1, steps):
        life = torch.where(ahead[:, 2 + step : 2 + step + width], step, life)
    life = life.flatten()
    order = life.argsort(descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(batch * width, device=device))
    later = torch.arange(1, steps, device=device)
    counts = (life >= later.unsqueeze(1)).sum(1).tolist()

    answers = F.pad(loss_mask[:, 1:], (0, 1)).flatten().nonzero().squeeze(1)
    rows = answers - 1 - torch.arange(steps, device=device).unsqueeze(1)  # [K, M], as indices into B * S
    there = rows >= answers // width * width
    found = torch.cat((rows[:1], ranks[rows[1:].clamp(min=0)]))
    return ChainRows(order[: counts[0] if counts else 0], [batch * width, *counts], answers, found.where(there, -1))
