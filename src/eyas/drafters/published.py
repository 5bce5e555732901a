"""Reading the field's config.json files: what drafter kinds with decoder layers have in common."""

from __future__ import annotations

from typing import Any

from eyas.drafters.config import GroupedConfig, TransformerConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.rope import read_rope
from eyas.errors import ConfigError


def read_ownership(fields: Fields) -> None:
    """Whose embedding and head a checkpoint uses: the target's, where the file has none."""
    if fields.names is not None:
        for part, tensor in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
            fields.values[part] = "own" if tensor in fields.names else "shared"


def read_decoder(fields: Fields) -> None:
    """Bring the keys of a decoder's config into our form; refuse what the layers here can't do."""
    where = fields.where
    fields.values["rope_parameters"] = read_rope(fields)
    if fields.take("tie_word_embeddings", bool, default=False):
        raise ConfigError(f"{where}: tie_word_embeddings is true, but a drafter's head is never its embedding")
    window = fields.values.pop("sliding_window", None)
    if fields.take("use_sliding_window", bool, default=True) and window is not None:
        raise ConfigError(f"{where}: eyas has no sliding-window drafter; set sliding_window to null")
    if any(kind != "full_attention" for kind in fields.take("layer_types", list, default=[])):
        raise ConfigError(f"{where}: only full_attention drafter layers are supported")
    fields.default("target_hidden_size", fields.values.get("hidden_size"))
    fields.default("draft_vocab_size", fields.values.get("vocab_size"))


def read_grouped_heads(fields: Fields) -> None:
    """Fill in the head size and the number of key-value heads."""
    heads, size = fields.values.get("num_attention_heads"), fields.values.get("hidden_size")
    if isinstance(heads, int) and heads > 0 and isinstance(size, int):
        if not fields.values.get("head_dim"):
            fields.values.pop("head_dim", None)
        fields.default("head_dim", size // heads)
    fields.default("num_key_value_heads", heads)


def decoder_dict(config: TransformerConfig, architecture: str) -> dict[str, Any]:
    """The config.json form that other engines read: RoPE in both places, ownership left to the tensors."""
    values = config.model_dump(exclude={"taps", "default_tree", "embedding", "head"}, exclude_none=True)
    values["architectures"] = [architecture]
    values["model_type"] = "llama" if isinstance(config, GroupedConfig) else "deepseek_v3"
    values["tie_word_embeddings"] = False
    values["rope_theta"] = config.rope_parameters["rope_theta"]
    if config.default_tree is not None:
        values["default_tree"] = config.default_tree
    return values
