"""What an EAGLE-3 drafter is made of, read from the field's config.json (EAGLE-3, and 3.1 as toggles on it).

Absent 3.1 fields mean plain EAGLE-3.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from eyas.drafters.config import (
    GroupedConfig,
    TransformerConfig,
    decoder_dict,
    read_decoder,
    read_grouped_heads,
    read_ownership,
)
from eyas.drafters.formats.fields import Fields, architectures
from eyas.drafters.formats.taps import IDS, LIMIT, read_taps
from eyas.drafters.layers import Attend, Attention, DecoderBlock, DecoderLayer, RMSNorm, Rope, Rotary
from eyas.drafters.network import DraftNetwork
from eyas.targets.slots import KVShape
from eyas.targets.taps import default_taps


class FusedTapsConfig(TransformerConfig):
    """A drafter that fuses several taps of the target with `fc`: EAGLE-3 with any kind of attention."""

    num_aux_hidden_states: int = Field(default=3, ge=1, le=LIMIT)
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    @property
    def tap_count(self) -> int:
        return self.num_aux_hidden_states

    def default_taps(self, layers: int) -> tuple[int, ...]:
        return default_taps(layers)


QWEN3 = "Eagle3Qwen3ForCausalLM"
"""The architecture whose attention norms queries and keys."""


class Eagle3Config(FusedTapsConfig, GroupedConfig):
    """Sizes and toggles."""

    qk_norm: bool = False
    """Norm every head's queries and keys before they are rotated, as Qwen3's attention does."""


def read(fields: Fields) -> Eagle3Config:
    """Read a checkpoint's configuration; refuse a key that is neither known nor to be overlooked."""
    read_fused_taps(fields)
    read_grouped_heads(fields)
    fields.default("qk_norm", QWEN3 in architectures(fields.raw))
    return fields.finish(Eagle3Config)


def config_to_dict(config: Eagle3Config) -> dict[str, Any]:
    """The config.json form that vLLM, SGLang and eyas read."""
    values = decoder_dict(config, QWEN3 if config.qk_norm else "LlamaForCausalLMEagle3") | taps_dict(config)
    if config.qk_norm:
        values["model_type"] = "qwen3"
    else:
        del values["qk_norm"]
    return values


def read_fused_taps(fields: Fields) -> None:
    """What EAGLE-3 configurations share whatever their attention."""
    taps = fields.values["taps"] = read_taps(fields)
    read_decoder(fields)
    read_ownership(fields)
    fields.ignore("bias", "of EAGLE-1's fc; an fc.bias tensor would be reported as an extra tensor")
    fields.default("num_aux_hidden_states", len(taps) if taps else 3)


def taps_dict(config: FusedTapsConfig) -> dict[str, Any]:
    """The taps where both families of readers look for them, and where no reader can take them for something else."""
    if config.taps is None:
        return {}
    taps = list(config.taps)
    return {"taps": taps, IDS: taps, "eagle_config": {IDS: taps, "use_aux_hidden_state": True}}


# The EAGLE-3 network (arXiv 2503.01840) with the 3.1 toggles, shared by decoding and training.
#
# Shapes: B batch, S positions, A taps, Ht target hidden, H draft hidden, Vd draft vocabulary.


class FirstLayer(DecoderBlock):
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
        return [layer.kv_shape for layer in self.layers if isinstance(layer, DecoderBlock)]

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
