"""Do two draft networks compute the same? Tried on random states, with outputs fed back.

Shapes: S positions, A taps, Ht target hidden, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafters.layers import grouped_attention
from eyas.drafters.network import DraftNetwork

POSITIONS, STEPS = 24, 3


@torch.inference_mode()
def some_logits(network: DraftNetwork) -> Tensor:
    """[STEPS, S, Vd] float32: a pass over random taps and tokens, then its own outputs fed back."""
    config, draw = network.config, torch.Generator().manual_seed(11)
    taps = torch.randn(1, POSITIONS, config.tap_count, config.target_hidden_size, generator=draw).to(network.dtype)
    hidden, found = network.fuse(taps), []
    for step in range(STEPS):
        tokens = torch.randint(config.vocab_size, (1, POSITIONS), generator=draw)
        positions = torch.arange(POSITIONS).unsqueeze(0) + 37 * step
        hidden, normed = network.step(tokens, hidden, positions, _causal)
        found.append(network.logits(normed)[0].float())
    return torch.stack(found)


def _causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return grouped_attention(q, k, v, mask)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Relative to the largest logit."""
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))
