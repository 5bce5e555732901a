"""Blocks for training: anchors sampled in the answers, each with the slots that decoding would run after it.

Row i of a batch is the pair (state at i, token i + 1), as in the training-time test; its block begins with token
i + 1, the anchor, and sees the states up to i. Guess j of the block predicts token i + 2 + j. A guess counts only if
all tokens from the anchor's successor up to its own are answer tokens, as DSpark's trainer has it.

Shapes: C chats, S positions, A taps, Ht target hidden, H draft hidden, n anchors, B slots, K guesses of a block, M
answer tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.block.network import BlockConfig, BlockNetwork, Store
from eyas.train.loss.block_attention import Anchors, BlockAttention
from eyas.train.loss.ttt import ChainRows


class Blocks(NamedTuple):
    """What blocks read, and what they are to guess."""

    anchors: Anchors
    masked: Tensor  # [n, B] the anchor, then mask tokens
    positions: Tensor  # [n, B]
    before: Tensor  # [n, K] the true token before each guess's own
    alive: Tensor  # [n, K] bool: which guesses count
    loss_mask: Tensor  # [C, S] of the whole batch

    def part(self, chosen: slice) -> Blocks:
        """The `chosen` blocks alone, with all that is said of them."""
        return self._replace(
            anchors=self.anchors.part(chosen),
            masked=self.masked[chosen],
            positions=self.positions[chosen],
            before=self.before[chosen],
            alive=self.alive[chosen],
        )

    def rows(self) -> ChainRows:
        """All answer tokens of the batch, and these blocks' guesses of them."""
        return _rows(self.anchors.rows, self.alive, self.loss_mask)


def sampled_anchors(loss_mask: Tensor, most: int | None, key: tuple[int, ...]) -> Anchors:
    """Up to `most` anchors a chat (None = all), drawn by `key`; loss_mask [C, S] is true at answer tokens.

    An anchor is an answer token that another one follows.
    """
    follows = F.pad(loss_mask[:, 1:] & F.pad(loss_mask[:, 2:], (0, 1)), (0, 1))  # [C, S], at the pair before the anchor
    draw = np.random.default_rng(np.random.SeedSequence(key))
    chats: list[int] = []
    positions: list[int] = []
    for chat, row in enumerate(follows.cpu().numpy()):
        found = np.flatnonzero(row)
        if most is not None and len(found) > most:
            found = np.sort(draw.choice(found, most, replace=False))
        chats += [chat] * len(found)
        positions += found.tolist()
    rows = torch.tensor(chats, dtype=torch.int64) * loss_mask.shape[1] + torch.tensor(positions, dtype=torch.int64)
    return Anchors(rows.to(loss_mask.device), chats, positions)


def blocks_at(
    config: BlockConfig, tokens: Tensor, loss_mask: Tensor, anchors: Anchors, steps: int, starts: Tensor | None = None
) -> Blocks:
    """The blocks of all anchors, with K = `steps` guesses each; tokens, loss_mask [C, S].

    `starts` [C]: the position of each chat's first token; None = 0.
    """
    width = tokens.shape[1]
    ahead = F.pad(tokens, (0, steps + 1)).unfold(1, steps + 1, 1)  # [C, S + 1, K + 1] the tokens from each position on
    following = ahead[:, 1 : width + 1].flatten(0, 1)[anchors.rows]  # [n, K + 1]: the anchor and what it is to guess
    masked = F.pad(following[:, :1], (0, config.block_size - 1), value=config.mask_token_id)
    start = (_positions(tokens, starts).flatten()[anchors.rows] + 1).unsqueeze(1)
    alive = F.pad(loss_mask, (0, steps + 2)).unfold(1, steps, 1)[:, 2 : width + 2].flatten(0, 1)[anchors.rows]
    positions = start + torch.arange(config.block_size, device=tokens.device)
    return Blocks(anchors, masked, positions, following[:, :steps], alive.long().cumprod(1).bool(), loss_mask)


def read_context(network: BlockNetwork, taps: Tensor, store: Store, starts: Tensor | None = None) -> None:
    """Make every layer's keys and values of the taps [C, S, A, Ht] of chats, which begin at `starts` [C]; None = 0."""
    network.read(network.fuse(taps).to(taps.dtype), _positions(taps, starts), store)


def _positions(like: Tensor, starts: Tensor | None) -> Tensor:
    """[C, S] the positions of chats that begin at `starts` [C]; None = 0."""
    steps = torch.arange(like.shape[1], device=like.device)
    return steps.expand(like.shape[:2]) if starts is None else starts.unsqueeze(1) + steps


def guessed(network: BlockNetwork, hidden: Tensor, blocks: Blocks, attention: BlockAttention) -> Tensor:
    """The states [n, K, H] of the guesses of blocks with embeddings `hidden` [n, B, H]."""
    first, steps = 0 if network.config.sample_from_anchor else 1, blocks.before.shape[1]
    return network.states(hidden, blocks.positions, attention)[:, first : first + steps]


def _rows(at: Tensor, alive: Tensor, loss_mask: Tensor) -> ChainRows:
    """The answer tokens and their guesses; `alive` [n, K] says which guesses count."""
    count, steps, total = *alive.shape, loss_mask.numel()
    index = torch.full((total + steps,), -1, dtype=torch.int64, device=at.device)
    index[at] = torch.arange(count, device=at.device)
    answers = F.pad(loss_mask[:, 1:], (0, 1)).flatten().nonzero().squeeze(1)
    rows = answers - 1 - torch.arange(steps, device=at.device).unsqueeze(1)  # [K, M]
    inside = rows >= answers // loss_mask.shape[1] * loss_mask.shape[1]
    found = index[rows.clamp(min=0)].where(inside, -1)
    steps_of = torch.arange(steps, device=at.device).unsqueeze(1).expand_as(found)
    counted = alive[found.clamp(min=0), steps_of] & (found >= 0) if count else found >= 0
    return ChainRows(at, [total, *[count] * (steps - 1)], answers, found.where(counted, -1))
