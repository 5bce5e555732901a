"""The EAGLE-3 network (arXiv 2503.01840) with the 3.1 toggles, shared by decoding and training.

Shapes: B batch, S positions, A taps, Ht target hidden, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas.drafters.eagle3.config import Eagle3Config, FusedTapsConfig
from eyas.drafters.layers import Attend, Attention, Block, DecoderLayer, RMSNorm, Rope, Rotary
from eyas.drafters.network import DraftNetwork
from eyas.target.slots import KVShape


class FirstLayer(Block):
    """Attention reads the token embedding beside the state, each under its own norm (width 2H)."""

    def __init__(self, config: FusedTapsConfig, attention: nn.Module) -> None:
        super().__init__(config, 0, attention)
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """embedded, hidden [B, S, H] -> the residual stream [B, S, H]."""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return self.mix(x, normed if self.norm_before_residual else hidden, rope, attend)


class FusedTapsNetwork(DraftNetwork):
    """Everything of EAGLE-3 but the kind of attention, which `attention(width)` makes."""

    config: FusedTapsConfig

    def __init__(self, config: FusedTapsConfig) -> None:
        super().__init__(config)
        size, taps, eps = config.hidden_size, config.num_aux_hidden_states, config.rms_norm_eps
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps=eps) for _ in range(taps))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * config.target_hidden_size, eps=eps)
        self.fc = nn.Linear(taps * config.target_hidden_size, size, bias=False)
        first = FirstLayer(config, self.attention(2 * size))
        later = (DecoderLayer(config, i, self.attention(size)) for i in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList((first, *later))
        self.norm = RMSNorm(size, eps=eps)
        self.rotary = Rotary(config)

    def attention(self, width: int) -> nn.Module:
        """A layer's attention over inputs [B, S, width]; it has a `kv_shape`."""
        raise NotImplementedError

    @property
    def kv_shapes(self) -> list[tuple[KVShape, KVShape]]:
        return [layer.kv_shape for layer in self.layers if isinstance(layer, Block)]

    def fuse(self, taps: Tensor) -> Tensor:
        if self.config.fc_norm:
            taps = torch.stack([norm(taps[:, :, i]) for i, norm in enumerate(self.fc_norm)], dim=2)
        wide = taps.flatten(2)
        if self.config.norm_before_fc:
            wide = self.input_norm(wide)
        out: Tensor = self.fc(wide)
        return out

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """As the base says; with `norm_output` the state fed back is the normed one, the same tensor."""
        rope = self.rotary(hidden, positions)
        first, *later = self.layers
        hidden = first(self.embed(tokens), hidden, rope, attend)
        for layer in later:
            hidden = layer(hidden, rope, attend)
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed


class Eagle3Network(FusedTapsNetwork):
    """EAGLE-3 as published: grouped-query attention."""

    config: Eagle3Config

    def attention(self, width: int) -> nn.Module:
        return Attention(self.config, width, qk_norm=self.config.qk_norm)
