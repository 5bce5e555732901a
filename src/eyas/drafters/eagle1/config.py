"""What an EAGLE-1 drafter is made of, read from the field's config.json: the target's own keys and `bias`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from eyas.drafters.config import FeatureConfig, GroupedConfig
from eyas.drafters.published import decoder_dict, finish, ownership, read_decoder, read_grouped_heads, relevant
from eyas.errors import ConfigError


class Eagle1Config(FeatureConfig, GroupedConfig):
    """Sizes and biases; it reads the boundary after the target's final norm, always."""

    bias: bool = True
    """Of `fc`."""
    qkv_bias: bool = False
    """Of queries, keys and values alone, as Qwen2's drafters have it."""


def config_from_dict(
    raw: dict[str, Any], where: str, ignore: Collection[str] = (), names: Collection[str] | None = None
) -> Eagle1Config:
    """Read a checkpoint's config.json; refuse a key that is neither known nor named in `ignore`.

    `names` are the checkpoint's tensors; without them embedding and head are taken to be there.
    """
    values = relevant(raw, ignore)
    if "taps" in values:
        raise ConfigError(
            f"{where}: taps: an EAGLE-1 drafter reads the target's last state after its final norm, no other"
        )
    values.pop("tie_word_embeddings", None)  # the target's own habit; here both are in the file or the target's
    read_decoder(values, where)
    read_grouped_heads(values)
    return finish(Eagle1Config, values | ownership(names), where)


def config_to_dict(config: Eagle1Config) -> dict[str, Any]:
    """The config.json form that SafeAILab, SGLang, vLLM and eyas read."""
    values = decoder_dict(config, "EagleLlamaForCausalLM")
    del values["target_hidden_size"]
    if config.draft_vocab_size == config.vocab_size:
        del values["draft_vocab_size"]  # a name by which others tell an EAGLE-3 drafter
    if not config.qkv_bias:
        del values["qkv_bias"]
    return values
