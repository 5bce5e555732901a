"""config.json of drafters with decoder layers: the keys that their kinds share, including the RoPE section.

That section is in one of two places and has old or new names.
"""

from __future__ import annotations

from typing import Any

from eyas.drafters.config import FusedTapsConfig, GroupedConfig, TransformerConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.taps import IDS, read_taps
from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.errors import ConfigError

_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
"""Every RoPE type that eyas computes, with the numbers that it requires."""
_KNOWN = frozenset(
    "rope_type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings attention_factor "
    "beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor".split()
)
"""The known keys of the RoPE section."""
_LARGEST = 1e15
"""The largest absolute value accepted for a number."""
_MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""Keys of rotations with three positions per token, for images. In text the three are equal: the plain rotation."""


def read_rope(fields: Fields) -> dict[str, Any]:
    """Read `rope_parameters` (new), or `rope_theta` and `rope_scaling` (old); theta may be in either place.

    Raises ConfigError for what eyas doesn't compute.
    """
    new = fields.take("rope_parameters", dict)
    old = fields.take("rope_scaling", dict)
    rope = dict(new or old or {})
    flat = fields.values.pop("rope_theta", None)
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = flat
    elif flat is not None and flat != rope["rope_theta"]:
        raise ConfigError(
            f"{fields.where}: rope_theta is {flat} at the top level and {rope['rope_theta']} in the RoPE section: "
            "readers of the two places compute different rotations; keep the one that the drafter was trained with"
        )
    if rope["rope_theta"] is None:
        rope["rope_theta"] = fields.defaulted["rope_theta"] = 10000.0
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    for key in _MULTIMODAL:
        if rope.pop(key, None) is not None:
            fields.ignored[key] = "the three positions of a text token are equal"
    _check(rope, fields)
    return rope


def _check(rope: dict[str, Any], fields: Fields) -> None:
    kind = rope["rope_type"]
    where = fields.where
    for key in sorted(set(rope) - _KNOWN):
        if key not in fields.keys_to_ignore:
            raise ConfigError(f"{where}: unknown key {key} in the RoPE section: eyas can't tell what it changes")
        del rope[key]
    if not isinstance(kind, str) or kind not in _NUMBERS:
        raise ConfigError(f"{where}: rope_type {kind!r}: eyas computes {', '.join(_NUMBERS)}")
    for key in ("rope_theta", *_NUMBERS[kind]):
        if not _positive(rope.get(key)):
            raise ConfigError(f"{where}: RoPE of type {kind} needs a positive number as {key}, not {rope.get(key)!r}")
    for key, value in rope.items():
        if key == "rope_type" or key in ("short_factor", "long_factor"):
            continue
        if not (value is None or _number(value) or (key == "truncate" and isinstance(value, bool))):
            raise ConfigError(f"{where}: {key} of the RoPE section is {value!r}, which is not a valid number")
    if kind == "llama3" and rope["low_freq_factor"] == rope["high_freq_factor"]:
        raise ConfigError(f"{where}: low_freq_factor and high_freq_factor are equal: llama3 scaling needs a range")
    for key in ("short_factor", "long_factor"):
        factors = rope.get(key)
        listed = isinstance(factors, list) and all(_positive(factor) for factor in factors)
        if not listed and (kind == "longrope" or factors is not None):
            raise ConfigError(f"{where}: {key} of the RoPE section is no list of positive numbers")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def read_decoder(fields: Fields) -> None:
    """Convert the keys of decoder layers to native form. Raises ConfigError for what the layers can't compute."""
    where = fields.where
    fields.values["rope_parameters"] = read_rope(fields)
    if fields.names is not None and HEAD in fields.names:
        fields.ignore("tie_word_embeddings", "about the target: the file has a head of its own")
    elif fields.take("tie_word_embeddings", bool, default=False):
        raise ConfigError(f"{where}: tie_word_embeddings is true, but a drafter's head is never its embedding")
    window = fields.values.pop("sliding_window", None)
    if fields.take("use_sliding_window", bool, default=True) and window is not None:
        raise ConfigError(f"{where}: eyas has no sliding-window drafter of this kind; set sliding_window to null")
    if any(layer != "full_attention" for layer in fields.take("layer_types", list, default=[])):
        raise ConfigError(f"{where}: only full_attention drafter layers are supported")
    fields.default("target_hidden_size", fields.values.get("hidden_size"))
    fields.default("draft_vocab_size", fields.values.get("vocab_size"))
    if fields.names is not None:
        for part, tensor in (("embedding", EMBEDDING), ("head", HEAD)):
            fields.values[part] = "own" if tensor in fields.names else "shared"


def read_grouped_heads(fields: Fields) -> None:
    """Fill in the head size and the number of key-value heads if they are missing."""
    heads = fields.values.get("num_attention_heads")
    size = fields.values.get("hidden_size")
    if isinstance(heads, int) and heads > 0 and isinstance(size, int):
        if not fields.values.get("head_dim"):
            fields.values.pop("head_dim", None)
        fields.default("head_dim", size // heads)
    fields.default("num_key_value_heads", heads)


def read_fused_taps(fields: Fields) -> None:
    """Read the keys that EAGLE-3 configurations share, whatever their attention."""
    taps = fields.values["taps"] = read_taps(fields)
    read_decoder(fields)
    fields.ignore("bias", "of EAGLE-1's fc; an fc.bias tensor would be reported as an extra tensor")
    fields.default("num_aux_hidden_states", len(taps) if taps else 3)


def decoder_dict(config: TransformerConfig, architecture: str) -> dict[str, Any]:
    """The config.json that other engines read. Ownership isn't written: it follows from the tensors in the file."""
    # windows are written by `windows_dict`
    others = {"taps", "default_tree", "embedding", "head", "sliding_window", "layer_types", "sliding_anchored"}
    values = config.model_dump(exclude=others, exclude_none=True)
    values["architectures"] = [architecture]
    values["model_type"] = "llama" if isinstance(config, GroupedConfig) else "deepseek_v3"
    values["tie_word_embeddings"] = False
    values["rope_theta"] = config.rope_parameters["rope_theta"]
    if config.default_tree is not None:
        values["default_tree"] = config.default_tree
    return values


def taps_dict(config: FusedTapsConfig) -> dict[str, Any]:
    """The keys of the taps: the two that other readers look for, and `taps`, which has only one meaning."""
    if config.taps is None:
        return {}
    taps = list(config.taps)
    return {"taps": taps, IDS: taps, "eagle_config": {IDS: taps, "use_aux_hidden_state": True}}
