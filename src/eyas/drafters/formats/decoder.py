"""config.json of drafters with decoder layers: what their kinds read and write alike."""

from __future__ import annotations

from typing import Any

from eyas.drafters.config import FusedTapsConfig, GroupedConfig, TransformerConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.rope import read_rope
from eyas.drafters.formats.taps import IDS, read_taps
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.errors import ConfigError


def read_decoder(fields: Fields) -> None:
    """Bring the keys of decoder layers into our form. Raises ConfigError for what the layers here can't compute."""
    where = fields.where
    fields.values["rope_parameters"] = read_rope(fields)
    if fields.take("tie_word_embeddings", bool, default=False):
        raise ConfigError(f"{where}: tie_word_embeddings is true, but a drafter's head is never its embedding")
    window = fields.values.pop("sliding_window", None)
    if fields.take("use_sliding_window", bool, default=True) and window is not None:
        raise ConfigError(f"{where}: eyas has no sliding-window drafter; set sliding_window to null")
    if any(layer != "full_attention" for layer in fields.take("layer_types", list, default=[])):
        raise ConfigError(f"{where}: only full_attention drafter layers are supported")
    fields.default("target_hidden_size", fields.values.get("hidden_size"))
    fields.default("draft_vocab_size", fields.values.get("vocab_size"))
    if fields.names is not None:
        for part, tensor in (("embedding", EMBEDDING), ("head", HEAD)):
            fields.values[part] = "own" if tensor in fields.names else "shared"


def read_grouped_heads(fields: Fields) -> None:
    """Fill in the head size and the number of key-value heads where they are left out."""
    heads, size = fields.values.get("num_attention_heads"), fields.values.get("hidden_size")
    if isinstance(heads, int) and heads > 0 and isinstance(size, int):
        if not fields.values.get("head_dim"):
            fields.values.pop("head_dim", None)
        fields.default("head_dim", size // heads)
    fields.default("num_key_value_heads", heads)


def read_fused_taps(fields: Fields) -> None:
    """Read what EAGLE-3 configurations share, whatever their attention."""
    taps = fields.values["taps"] = read_taps(fields)
    read_decoder(fields)
    fields.ignore("bias", "of EAGLE-1's fc; an fc.bias tensor would be reported as an extra tensor")
    fields.default("num_aux_hidden_states", len(taps) if taps else 3)


def decoder_dict(config: TransformerConfig, architecture: str) -> dict[str, Any]:
    """The config.json that other engines read. Ownership isn't written: the tensors in the file show it."""
    values = config.model_dump(exclude={"taps", "default_tree", "embedding", "head"}, exclude_none=True)
    values["architectures"] = [architecture]
    values["model_type"] = "llama" if isinstance(config, GroupedConfig) else "deepseek_v3"
    values["tie_word_embeddings"] = False
    values["rope_theta"] = config.rope_parameters["rope_theta"]
    if config.default_tree is not None:
        values["default_tree"] = config.default_tree
    return values


def taps_dict(config: FusedTapsConfig) -> dict[str, Any]:
    """The keys of the taps: where both families of readers look, and `taps`, which has only one meaning."""
    if config.taps is None:
        return {}
    taps = list(config.taps)
    return {"taps": taps, IDS: taps, "eagle_config": {IDS: taps, "use_aux_hidden_state": True}}
