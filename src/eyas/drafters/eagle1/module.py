"""The EAGLE-1 network (arXiv 2401.15077): it predicts the target's next feature, and the target's head reads it.

The feature is the target's last state after its final norm. Embedding and feature are mixed by `fc`; the first layer
has no norm at its input, there is none after the last, and the raw output is fed back.

Shapes: B batch, S positions, H hidden (the target's).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas.drafters.eagle1.config import Eagle1Config
from eyas.drafters.layers import Attend, Attention, DecoderLayer, Rotary
from eyas.drafters.network import DraftNetwork
from eyas.target.slots import KVShape


class Eagle1Network(DraftNetwork):
    """One decoder layer (or more) on the target's own features."""

    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, Attention(config, size, config.qkv_bias), input_norm=i > 0)
            for i in range(config.num_hidden_layers)
        )
        self.rotary = Rotary(config)

    @property
    def kv_shapes(self) -> list[tuple[KVShape, KVShape]]:
        return [layer.kv_shape for layer in self.layers if isinstance(layer, DecoderLayer)]

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """As the base says; what is fed back is what the head reads."""
        rope = self.rotary(hidden, positions)
        hidden = self.fc(torch.cat((self.embed(tokens), hidden), dim=-1))
        for layer in self.layers:
            hidden = layer(hidden, rope, attend)
        return hidden, hidden
