"""What an EAGLE-1 drafter is made of, read from the field's config.json: the target's own keys and `bias`."""

from __future__ import annotations

from typing import Any

from eyas.drafters.config import FeatureConfig, GroupedConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.published import decoder_dict, read_decoder, read_grouped_heads, read_ownership
from eyas.errors import ConfigError


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
