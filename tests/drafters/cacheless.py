"""Draft networks run without a cache, tree or batch, as a reference for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafters.kinds.medusa import MedusaNetwork
from eyas.drafters.network import DraftNetwork
from eyas.targets.attention import grouped_attention


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention without a cache."""
    return grouped_attention(q, k, v, torch.ones(q.shape[2], k.shape[2]).tril().bool())


def from_scratch(network: DraftNetwork, tokens: Tensor, taps: Tensor, path: list[int]) -> Tensor:
    """Log-probabilities [Vd] of the token after `path` below the last known token, from one causal pass.

    tokens [n + 1], taps [n, A, Ht]. Pair i is (state at i, token i + 1) at position i; a draft token's pair takes the
    state fed back by the pair before it.
    """
    if isinstance(network, MedusaNetwork):  # the last true state alone
        head = len(path)
        return network.logits_at(network.guess(network.fuse(taps[-1:, None])[0, 0], head), head).log_softmax(-1)
    tokens = tokens[1:]
    hidden = network.fuse(taps.unsqueeze(0))[0]
    for step in range(len(path) + 1):
        at = torch.arange(len(tokens)).unsqueeze(0)
        fed, normed = network.step(tokens.unsqueeze(0), hidden.unsqueeze(0), at, causal)
        if step < len(path):
            tokens = torch.cat((tokens, torch.tensor([path[step]])))
            hidden = torch.cat((hidden, fed[0, -1:]))
    return network.logits(normed[0, -1]).log_softmax(-1)
