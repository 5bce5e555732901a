"""A head of a few linear layers: from a state of the target and the next token's embedding to the next state.

    pred = SiLU(linear(... SiLU(linear(cat(embedding, state)))))
    output = s * pred + (1 - s) * state,   s = sigmoid(gate)

It has no attention, so a draft costs almost nothing and nothing is cached; it guesses from one state alone.

Shapes: B batch, S positions, H hidden (the target's).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.layers import Attend, RMSNorm
from eyas.drafters.mlp.config import MlpConfig
from eyas.drafters.network import DraftNetwork


class MlpNetwork(DraftNetwork):
    """`depth` times linear, SiLU and dropout; then the gate."""

    config: MlpConfig

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        first = size if config.embedding == "none" else 2 * size
        self.layers = nn.ModuleList(nn.Linear(size if i else first, size) for i in range(config.depth))
        self.dropout = nn.Dropout(config.dropout)
        if config.gate:
            self.gate = nn.Parameter(torch.zeros(1))
        if config.norm:
            self.norm = RMSNorm(size, eps=config.rms_norm_eps)

    def step(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,  # noqa: ARG002
        attend: Attend,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """As the base says; positions don't matter and nothing is attended to."""
        x = hidden if self.config.embedding == "none" else torch.cat((self.embed(tokens), hidden), dim=-1)
        for layer in self.layers:
            x = self.dropout(F.silu(layer(x)))
        if self.config.gate:
            share = self.gate.sigmoid()
            x = share * x + (1 - share) * hidden
        return x, (self.norm(x) if self.config.norm else x)
