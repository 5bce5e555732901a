"""Training-time test: the drafter is trained on its own output, as it is used in decoding.

Step 0 is the drafter after a commit: pair (target state at i, token i + 1) at RoPE position i predicts token
i + 2. Step j feeds token i + 1 + j and the drafter's own output of step j - 1 (gradients flow through), at
position i + j, and predicts token i + 2 + j. So row i over all steps is the chain of guesses that decoding
makes after committing pair i: it attends to the true pairs 0..i and its own guesses, never to another row's.

Medusa's heads all guess from the true state, so step j is head j (`_heads`). P-EAGLE's slots read the same masked pair
instead of guesses. Slot j sees only the slots before it, so step j computes what one pass over all slots would.

Step 0 computes every position, because later rows attend to its keys. A later step computes only rows whose chain, from
that step on, still predicts an answer token: prompt rows and rows past the last answer are left out.

In a drafter with a window, row i sees at every step the pairs that the window keeps of the first i + 1 (`Windowed`). In
a layer with a sliding window it sees the last ones, and, if the window counts from each guess, one less at each step
(`Sliding`); its own guesses always.

Rows may be sampled for later steps (P-EAGLE's conditional drop-token sampling). A row that is left out of one step is
left out of all later ones, so rows are still whole chains, only shorter.

Shapes: B chats, S positions, A taps, Ht target hidden, H draft hidden, K steps, M answer tokens, R rows of later steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.levels import HeadsNetwork
from eyas.drafters.network import DraftNetwork
from eyas.drafters.window.window import Window
from eyas.train.loss.chain_attention import ChainAttention, Windowed


def unrolled(
    network: DraftNetwork, tokens: Tensor, taps: Tensor, rows: ChainRows, starts: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (state fed back, state the head reads) of each step's rows, both [rows.counts[step], H].

    tokens [B, S], taps [B, S, A, Ht]. Step 0 has all B * S rows; later steps have those in `rows`, of all chats in one
    sequence. `starts` [B]: the position of each chat's first token; None = 0. Stops early when no row is left.
    """
    if isinstance(network, HeadsNetwork):
        yield from _heads(network, taps, rows)
        return
    batch, width = tokens.shape
    window = getattr(network.config, "draft_window", None)
    kernel = None if window is None else Windowed(Window(window), cast(Any, network).rotary.rotated_by)
    first = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    if starts is not None and window is None:  # in a window, positions count the pairs that are kept
        first = starts
    positions = first.unsqueeze(1) + torch.arange(width, device=tokens.device)
    attention = ChainAttention(rows.indices, kernel, network.layer_windows)
    hidden = network.fuse(taps).to(taps.dtype)  # the residual stream keeps its precision under autocast
    last = torch.nn.functional.pad(tokens[:, 1:], (0, 1))  # a chat's last pair has no next token and no loss
    masked = network.masked_pair()
    if masked is not None and not any(rows.counts[1:]):
        hidden = hidden + 0 * masked.state.to(taps.dtype)  # every process needs a gradient of the masked state
    fed, normed = network.step(last, hidden, positions, attention)
    yield fed.flatten(0, 1), normed.flatten(0, 1)
    flat = tokens.flatten()
    at = positions.flatten()[rows.indices].unsqueeze(0)
    fed = fed.flatten(0, 1).index_select(0, rows.indices).unsqueeze(0)
    for step, count in enumerate(rows.counts[1:], start=1):
        if not count:
            return
        following = flat[rows.indices[:count] + 1 + step].unsqueeze(0)
        fed = fed[:, :count]
        if masked is not None:
            following = torch.full_like(following, masked.token)
            fed = masked.state.to(taps.dtype).expand_as(fed)
        fed, normed = network.step(following, fed, at[:, :count] + step, attention)
        yield fed[0], normed[0]


def _heads(network: HeadsNetwork, taps: Tensor, rows: ChainRows) -> Iterator[tuple[Tensor, Tensor]]:
    """The steps of heads that guess from the true state alone: step j is head j, and nothing is fed back."""
    states = network.fuse(taps).to(taps.dtype).flatten(0, 1)  # [B * S, H]
    for step, count in enumerate(rows.counts):
        # if no row is left, one is run anyway: every process needs gradients of every head
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
    guesses: Tensor  # [K, M] int64: the row of the token's guess among the step's rows; -1 if there is none
    shares: list[float] | None = None
    """Share of each step's chains that was drawn; None = all chains."""


@dataclass(frozen=True)
class PositionSampling:
    """The share of its chains that each step keeps: `ratio` ** step, but at least `least`; `key` seeds the draw."""

    ratio: float
    least: float
    key: tuple[int, ...]

    def last_steps(self, loss_mask: Tensor, steps: int) -> tuple[Tensor, list[float]]:
        """The last step of each row [B, S], and the share of its chains that each step keeps.

        A row has a chain at a step if all tokens that it predicts up to that step are answer tokens.
        """
        draw = np.random.default_rng(np.random.SeedSequence(self.key))
        ahead = np.pad(loss_mask.cpu().numpy(), ((0, 0), (0, steps + 1)))
        width = loss_mask.shape[1]
        whole = ahead[:, 2 : 2 + width]
        kept = whole
        life = np.zeros(whole.shape, dtype=np.int64)
        shares = [1.0]
        for step in range(1, steps):
            answers = ahead[:, 2 + step : 2 + step + width]
            whole = whole & answers
            pool = np.flatnonzero(kept & answers)
            wanted = round(max(self.ratio**step, self.least) * int(whole.sum()))
            kept = np.zeros_like(whole)
            kept.flat[draw.choice(pool, min(wanted, len(pool)), replace=False)] = True
            life[kept] = step
            shares.append(float(kept.sum() / max(1, whole.sum())))
        return torch.from_numpy(life).to(loss_mask.device), shares


def chain_rows(loss_mask: Tensor, steps: int, sampling: PositionSampling | None = None) -> ChainRows:
    """The rows of a batch; loss_mask [B, S] is true at answer tokens. Syncs with the device twice."""
    batch, width = loss_mask.shape
    device = loss_mask.device
    shares: list[float] | None = None
    if sampling is None:
        ahead = F.pad(loss_mask, (0, steps + 1))
        life = torch.zeros(batch, width, dtype=torch.int64, device=device)  # last step that predicts an answer token
        for step in range(1, steps):
            life = torch.where(ahead[:, 2 + step : 2 + step + width], step, life)
    else:
        life, shares = sampling.last_steps(loss_mask, steps)
    life = life.flatten()
    order = life.argsort(descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(batch * width, device=device))
    later = torch.arange(1, steps, device=device)
    counts = (life >= later.unsqueeze(1)).sum(1).tolist()

    answers = F.pad(loss_mask[:, 1:], (0, 1)).flatten().nonzero().squeeze(1)
    rows = answers - 1 - torch.arange(steps, device=device).unsqueeze(1)  # [K, M], as indices into B * S
    there = rows >= answers // width * width
    found = torch.cat((rows[:1], ranks[rows[1:].clamp(min=0)]))
    counts = [batch * width, *counts]
    there = there & (found < torch.tensor(counts, device=device).unsqueeze(1))
    return ChainRows(order[: counts[1] if steps > 1 else 0], counts, answers, found.where(there, -1), shares)
