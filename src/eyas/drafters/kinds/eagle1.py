"""EAGLE-1 (arXiv 2401.15077): predicts the target's next feature, which the target's own head reads.

The feature is the target's last state after its final norm. `fc` mixes the token embedding and the feature. There is no
norm at the first layer's input nor after the last layer, and the raw output is fed back. config.json has the target's
own keys and `bias`.

Shapes: B batch, S positions, H hidden (the target's).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eyas.drafters.config import FeatureConfig, GroupedConfig
from eyas.drafters.formats.decoder import decoder_dict, read_decoder, read_grouped_heads
from eyas.drafters.formats.fields import Fields
from eyas.drafters.kind import EAGLE, Kind
from eyas.drafters.network import Attend, Attention, DecoderLayer, DraftNetwork, Rotary, described, grouped_heads
from eyas.errors import ConfigError
from eyas.targets.native.decoder import DecoderDescription, DecoderForm


class Eagle1Config(FeatureConfig, GroupedConfig):
    """Sizes and biases. The only tap is the boundary after the target's final norm."""

    bias: bool = True
    """Whether `fc`, the mixing layer, has a bias."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases but the output projection has none, as in Qwen2's drafters."""


def read(fields: Fields) -> Eagle1Config:
    """The configuration in a checkpoint's config.json. Raises ConfigError, also for keys of unknown meaning."""
    if "taps" in fields.values:
        raise ConfigError(
            f"{fields.where}: taps: an EAGLE-1 drafter reads the target's last state after its final norm, no other"
        )
    fields.ignore("tie_word_embeddings", "about the target; a drafter's embedding and head are in its file, or shared")
    read_decoder(fields)
    read_grouped_heads(fields)
    return fields.finish(Eagle1Config)


def write(config: Eagle1Config) -> dict[str, Any]:
    """The config.json that SafeAILab, SGLang, vLLM and eyas read."""
    values = decoder_dict(config, "EagleLlamaForCausalLM")
    del values["target_hidden_size"]
    if config.draft_vocab_size == config.vocab_size:
        del values["draft_vocab_size"]  # others recognize EAGLE-3 by this key
    if not config.qkv_bias:
        del values["qkv_bias"]
    return values


class Eagle1Network(DraftNetwork):
    """One decoder layer or more on the target's features."""

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

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """See `DraftNetwork.step`; the state fed back is the one that the head reads."""
        rope = self.rotary(hidden, positions)
        hidden = self.fc(torch.cat((self.embed(tokens), hidden), dim=-1))
        for layer in self.layers:
            hidden = layer(hidden, rope, attend)
        return hidden, hidden

    def description(self) -> DecoderDescription:
        return described(self, grouped_heads(self.config), None, self.rotary, DecoderForm(mix=self.fc))


KIND = Kind(
    "eagle1",
    Eagle1Config,
    Eagle1Network,
    read,
    write,
    architectures=frozenset(
        # often the target's own architecture
        "EagleLlamaForCausalLM LlamaForCausalLMEagle LlamaForCausalLM Qwen2ForCausalLM MixtralForCausalLM".split()
    ),
    family=EAGLE,
    fixed_taps=True,
    paired_inputs=("fc.weight",),
    loss={"token_weight": 0.1, "feature": "smooth_l1", "feature_weight": 1.0, "unroll": 1, "noise": 0.2},
)
