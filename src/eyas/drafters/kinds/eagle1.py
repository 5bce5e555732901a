"""What an EAGLE-1 drafter is made of, read from the field's config.json: the target's own keys and `bias`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eyas.drafters.config import (
    FeatureConfig,
    GroupedConfig,
    decoder_dict,
    read_decoder,
    read_grouped_heads,
    read_ownership,
)
from eyas.drafters.formats.fields import Fields
from eyas.drafters.layers import Attend, Attention, DecoderLayer, Rotary
from eyas.drafters.network import DraftNetwork
from eyas.errors import ConfigError
from eyas.targets.slots import KVShape


class Eagle1Config(FeatureConfig, GroupedConfig):
    """Sizes and biases; it reads the boundary after the target's final norm, always."""

    bias: bool = True
    """Of `fc`."""
    qkv_bias: bool = False
    """Of queries, keys and values alone, as Qwen2's drafters have it."""


def read(fields: Fields) -> Eagle1Config:
    """Read a checkpoint's configuration; refuse a key that is neither known nor to be overlooked."""
    if "taps" in fields.values:
        raise ConfigError(
            f"{fields.where}: taps: an EAGLE-1 drafter reads the target's last state after its final norm, no other"
        )
    fields.ignore("tie_word_embeddings", "the target's own habit; here both are in the file or the target's")
    read_decoder(fields)
    read_grouped_heads(fields)
    read_ownership(fields)
    return fields.finish(Eagle1Config)


def config_to_dict(config: Eagle1Config) -> dict[str, Any]:
    """The config.json form that SafeAILab, SGLang, vLLM and eyas read."""
    values = decoder_dict(config, "EagleLlamaForCausalLM")
    del values["target_hidden_size"]
    if config.draft_vocab_size == config.vocab_size:
        del values["draft_vocab_size"]  # a name by which others tell an EAGLE-3 drafter
    if not config.qkv_bias:
        del values["qkv_bias"]
    return values


# The EAGLE-1 network (arXiv 2401.15077): it predicts the target's next feature, and the target's head reads it.
#
# The feature is the target's last state after its final norm. Embedding and feature are mixed by `fc`; the first layer
# has no norm at its input, there is none after the last, and the raw output is fed back.
#
# Shapes: B batch, S positions, H hidden (the target's).


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
