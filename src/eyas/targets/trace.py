"""Teacher forcing: the hidden states of whole chats, which drafters are trained on.

Long rows are read in chunks over a cache, so that no mask grows with the square of the length, and only the states of
the result grow with it.

Shapes: B rows, S positions, N states, A taps, Ht hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eyas.targets.native.linears import lone_torch
from eyas.targets.slots import StagedCache
from eyas.targets.states import StatePath
from eyas.targets.taps import caught_taps, stacked
from eyas.targets.transformers_names import given

if TYPE_CHECKING:
    from eyas.targets.target import Target

AT_ONCE = 4096
"""Rows of at most so many positions are read in one pass."""
CHUNK = 1024
"""Positions of a pass over longer rows."""


class Trace(NamedTuple):
    """The hidden states of teacher-forced tokens, for training."""

    taps: Tensor  # [B, S, A, Ht]
    final: Tensor  # [B, S, Ht], after the final norm: what the head reads


@torch.no_grad()
def traced(target: Target, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Trace:
    """The states of right-padded `tokens` [B, S] of `lengths` [B]."""
    with nullcontext() if target.native is None else lone_torch():
        return _whole(target, tokens, lengths, taps) if tokens.shape[1] <= AT_ONCE else _in_chunks(target, tokens, taps)


def _whole(target: Target, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Trace:
    """`traced` for rows that one pass takes, at most `AT_ONCE` tokens each."""
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    positions = steps.expand_as(tokens)
    seen = (steps.unsqueeze(1) >= steps).unsqueeze(0) & (
        (steps < lengths.unsqueeze(1)).unsqueeze(1) | torch.eye(len(steps), dtype=torch.bool, device=tokens.device)
    )
    mask = target.masks(torch.zeros_like(lengths), 0, seen, positions)
    with caught_taps(target.model.base_model, target.layers, taps) as caught:
        final = target.model.base_model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)[
            0
        ]
    return Trace(stacked(caught, tokens, target.hidden_size, target.dtype), final)


def _in_chunks(target: Target, tokens: Tensor, taps: Sequence[int]) -> Trace:
    """`traced` a chunk at a time. Padding needs no mask: it follows all that is real."""
    rows, width = tokens.shape
    cache = target.allocate(rows, width)
    parts: list[Trace] = []
    for start in range(0, width, CHUNK):
        piece = tokens[:, start : start + CHUNK]
        steps = torch.arange(piece.shape[1], device=tokens.device)
        positions = (start + steps).expand_as(piece)
        before = torch.full((rows,), start, device=tokens.device)
        if cache.states is not None:
            cache.states.begin(StatePath.of_prompts(range(rows), [piece.shape[1]] * rows, None, tokens.device))
        mask = target.masks(before, start, (steps.unsqueeze(1) >= steps).unsqueeze(0), positions)
        with caught_taps(target.model.base_model, target.layers, taps) as caught:
            final = target.model.base_model(
                input_ids=piece,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **given(target.model.base_model, StagedCache(cache, cache.staging(range(rows), piece.shape[1]))),
            )[0]
        cache.commit(range(rows), [range(piece.shape[1])] * rows)
        parts.append(Trace(stacked(caught, piece, target.hidden_size, target.dtype), final))
    return Trace(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))
