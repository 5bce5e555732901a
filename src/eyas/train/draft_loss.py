"""What a draft row is scored on: the target's own distribution, and how far a chain of guesses would get.

Shapes: B chats, S positions, K steps, M answer tokens of the batch, V / Vd full / draft vocabulary, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**24
"""Most logits made at once; a head of a large vocabulary is applied to few rows at a time."""


class Teacher(NamedTuple):
    """The target's view of every answer token, [M] in reading order."""

    chat: Tensor  # [M] int64, which chat
    position: Tensor  # [M] int64, position of the state that predicts the token: the token's own minus one
    probabilities: Tensor  # [M, Vd] softmax over the draft vocabulary alone
    covered: Tensor  # [M] share of the full softmax that the draft vocabulary holds
    best: Tensor  # [M] int64, the target's own greedy token (a full-vocabulary id)


@torch.no_grad()
def teach(
    head: Callable[[Tensor], Tensor], final: Tensor, loss_mask: Tensor, target_ids: Tensor, vocab_size: int
) -> Teacher:
    """Recompute the target's logits, only where an answer token is predicted, chunk by chunk.

    final [B, S, Ht], loss_mask [B, S] true at answer tokens, target_ids [Vd].
    """
    chat, position = loss_mask[:, 1:].nonzero(as_tuple=True)
    rows = final[chat, position]
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in torch.split(rows, size) if len(rows) else [rows]:
        logits = head(part).float()  # [m, V]
        kept = logits[:, target_ids]
        covered = (kept.logsumexp(-1) - logits.logsumexp(-1)).exp()
        found.append((kept.softmax(-1), covered, logits.argmax(-1)))
    probabilities, covered, best = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Teacher(chat, position, probabilities, covered, best)


class Scores(NamedTuple):
    """One step's rows, [m] each: row `position - 1 - step` of `chat` guessed the token after `position`."""

    rows: Tensor  # [m] indices into the teacher
    loss: Tensor  # [] summed soft cross entropy
    right: Tensor  # [m] bool: the drafter's first choice is the target's
    overlap: Tensor  # [m] sum of min(p, q): how often a sampled guess is accepted


def score(head: Callable[[Tensor], Tensor], normed: Tensor, teacher: Teacher, step: int, target_ids: Tensor) -> Scores:
    """Score step `step`, whose normed states are [B, S, H].

    Rows are kept whether or not the target's greedy token lies in the draft vocabulary.
    """
    rows = (teacher.position >= 1 + step).nonzero().squeeze(1)
    states = normed[teacher.chat[rows], teacher.position[rows] - 1 - step]  # [m, H]

    def part(states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_q = head(states).float().log_softmax(-1)  # [m, Vd]
        p = teacher.probabilities[rows]
        loss = -(p * log_q).sum()
        with torch.no_grad():
            overlap = torch.minimum(p * teacher.covered[rows, None], log_q.exp()).sum(-1)
            right = target_ids[log_q.argmax(-1)] == teacher.best[rows]
        return loss, right, overlap

    size = max(1, CHUNK_ELEMENTS // len(target_ids))
    if len(rows) <= size:
        return Scores(rows, *part(states, rows))
    # Big heads: a chunk's logits are made again in the backward pass instead of being kept.
    chunks = [
        checkpoint(part, s, r, use_reentrant=False)
        for s, r in zip(torch.split(states, size), torch.split(rows, size), strict=True)
    ]
    losses, right, overlap = zip(*chunks, strict=True)
    return Scores(rows, torch.stack(losses).sum(), torch.cat(right), torch.cat(overlap))


def accept_lengths(teacher: Teacher, scores: list[Scores]) -> Tensor:
    """[m0] tokens a greedy round would emit from each row of step 0: its unbroken right guesses, and one.

    A chain ends where the answer ends, as decoding would.
    """
    first = scores[0]
    chats = teacher.chat
    shape = (int(chats.max()) + 1, int(teacher.position.max()) + 1) if len(chats) else (1, 1)
    alive = torch.ones(shape, dtype=torch.bool, device=chats.device)
    length = torch.ones(shape, device=chats.device)
    for step, found in enumerate(scores):
        right = torch.zeros(shape, dtype=torch.bool, device=chats.device)
        right[chats[found.rows], teacher.position[found.rows] - 1 - step] = found.right
        alive = alive & right
        length = length + alive
    return length[chats[first.rows], teacher.position[first.rows] - 1]
