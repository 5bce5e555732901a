"""Training-time test: the drafter is trained on its own output, as it will be used.

Step 0 is the drafter after a commit: pair (target state at i, token i + 1) at RoPE position i predicts token
i + 2. Step j feeds token i + 1 + j and the drafter's own output of step j - 1 (gradients flow through), at
position i + j, and predicts token i + 2 + j. So row i over all steps is the chain of guesses that decoding
makes after committing pair i: it sees the true pairs 0..i and its own guesses, never another row's.

Shapes: B chats, S positions, A taps, Ht target hidden, H draft hidden, D head size, G = heads / kv_heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.drafters.network import DraftNetwork

BLOCK = 128
"""Query rows handled together: keys after the block's end are never touched, which halves the work."""


def unrolled(module: DraftNetwork, tokens: Tensor, taps: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the normed states [B, S, H] of each step. tokens [B, S], taps [B, S, A, Ht].

    Rows too close to the end for a step's tokens to exist read token 0; the caller counts none of them.
    """
    width = tokens.shape[1]
    ahead = F.pad(tokens, (0, steps))
    positions = torch.arange(width, device=tokens.device).expand_as(tokens)
    attention = ChainAttention()
    hidden = module.fuse(taps).to(taps.dtype)  # under autocast too, the residual stream keeps its precision
    for step in range(steps):
        hidden, normed = module.step(ahead[:, 1 + step : 1 + step + width], hidden, positions + step, attention)
        yield normed


class ChainAttention:
    """The `attend` of an unrolled chain: causal over the true pairs, plus the row's own guesses, one a step.

    Keys of later steps meet only the query of the same row: each adds a diagonal of scores, not a matrix.
    """

    def __init__(self) -> None:
        self._keys: dict[int, list[Tensor]] = {}  # layer -> one [B, kv, S, D] a step
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, heads, S, D]; k, v [B, kv, S, D] -> [B, heads, S, D]."""
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(k)
        values.append(v)
        grouped = torch.unflatten(q, 1, (k.shape[1], -1)) * q.shape[-1] ** -0.5  # [B, kv, G, S, D]
        blocks = [
            _attend_block(grouped, keys, values, start, min(start + BLOCK, q.shape[2]))
            for start in range(0, q.shape[2], BLOCK)
        ]
        return torch.cat(blocks, dim=3).flatten(1, 2)


def _attend_block(q: Tensor, keys: list[Tensor], values: list[Tensor], start: int, stop: int) -> Tensor:
    """Rows start..stop of grouped queries q [B, kv, G, S, D] -> [B, kv, G, R, D], where R = stop - start."""
    rows = q[:, :, :, start:stop]
    groups, count = rows.shape[2:4]
    folded = rows.flatten(2, 3)  # [B, kv, G*R, D]: queries of a group share keys, so they are one matrix
    scores = torch.unflatten(folded @ keys[0][:, :, :stop].transpose(2, 3), 2, (groups, count))  # [B, kv, G, R, stop]
    later = torch.ones(count, stop, dtype=torch.bool, device=q.device).triu(start + 1)
    scores = scores.masked_fill(later, float("-inf"))
    own = [(rows * k[:, :, None, start:stop]).sum(-1, keepdim=True) for k in keys[1:]]
    joint = torch.cat([scores, *own], dim=-1)  # [B, kv, G, R, stop + steps - 1]
    weights = joint.softmax(-1, dtype=torch.promote_types(joint.dtype, torch.float32)).to(q.dtype)
    out: Tensor = torch.unflatten(weights[..., :stop].flatten(2, 3) @ values[0][:, :, :stop], 2, (groups, count))
    for i, v in enumerate(values[1:]):
        out = out + weights[..., stop + i, None] * v[:, :, None, start:stop]
    return out
