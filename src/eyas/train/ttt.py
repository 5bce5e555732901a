"""Training-time test: the drafter is trained on its own output, as it will be used.

Step 0 is the drafter after a commit: pair (target state at i, token i + 1) at RoPE position i predicts token
i + 2. Step j feeds token i + 1 + j and the drafter's own output of step j - 1 (gradients flow through), at
position i + j, and predicts token i + 2 + j. So row i over all steps is the chain of guesses that decoding
makes after committing pair i: it sees the true pairs 0..i and its own guesses, never another row's.

Shapes: B chats, S positions, A taps, Ht target hidden, H draft hidden, R rows of a later step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.drafters.network import DraftNetwork
from eyas.train.chain_attention import ChainAttention
from eyas.train.chain_rows import ChainRows


def unrolled(network: DraftNetwork, tokens: Tensor, taps: Tensor, rows: ChainRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (state fed back, state the head reads) of each step's rows, both [rows.counts[step], H].

    tokens [B, S], taps [B, S, A, Ht]. Step 0 has all B * S rows; later steps those of `rows`, end to end whatever chat
    they are of. Stops early when no row is left.
    """
    batch, width = tokens.shape
    positions = torch.arange(width, device=tokens.device).expand(batch, width)
    attention = ChainAttention(rows.places)
    hidden = network.fuse(taps).to(taps.dtype)  # under autocast too, the residual stream keeps its precision
    last = torch.nn.functional.pad(tokens[:, 1:], (0, 1))  # the last pair of a chat has no token yet: no loss reads it
    fed, normed = network.step(last, hidden, positions, attention)
    yield fed.flatten(0, 1), normed.flatten(0, 1)
    flat, at = tokens.flatten(), (rows.places % width).unsqueeze(0)
    fed = fed.flatten(0, 1).index_select(0, rows.places).unsqueeze(0)
    for step, count in enumerate(rows.counts[1:], start=1):
        if not count:
            return
        fed, normed = network.step(
            flat[rows.places[:count] + 1 + step].unsqueeze(0), fed[:, :count], at[:, :count] + step, attention
        )
        yield fed[0], normed[0]
