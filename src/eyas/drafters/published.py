"""Reading the field's config.json files: what all drafter kinds have in common, and what is refused.

A key is either known to change nothing, read, or refused: eyas never guesses what an unknown key does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from eyas.config import StrictModel, validated
from eyas.drafters.config import GroupedConfig, TransformerConfig
from eyas.errors import ConfigError

# Keys of published config.json files that say nothing about the computation.
_DESCRIPTIVE = frozenset(
    "architectures model_type dtype torch_dtype transformers_version _name_or_path name_or_path auto_map bos_token_id "
    "eos_token_id pad_token_id use_cache initializer_range pretraining_tp return_dict output_hidden_states "
    "output_attentions chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type mlp_only_layers "
    "attention_dropout target_model_type max_window_layers eyas use_return_dict tie_encoder_decoder "
    "tokenizer_class".split()
)

ConfigT = TypeVar("ConfigT", bound=StrictModel)


def relevant(raw: dict[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """The keys that may matter."""
    return {key: value for key, value in raw.items() if key not in _DESCRIPTIVE and key not in ignore}


def ownership(names: Collection[str] | None) -> dict[str, str]:
    """Whose embedding and head a checkpoint with these tensors uses: the target's, where the file has none."""
    parts = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}
    return {} if names is None else {part: "own" if name in names else "shared" for part, name in parts.items()}


def read_decoder(values: dict[str, Any], where: str) -> None:
    """Bring the keys of a decoder's config into our form, in place; refuse what the layers here can't do."""
    values["rope_parameters"] = _pop_rope(values)
    if values.pop("tie_word_embeddings", False):
        raise ConfigError(f"{where}: tie_word_embeddings is true, but a drafter's head is never its embedding")
    if values.pop("sliding_window", None) is not None and values.pop("use_sliding_window", True):
        raise ConfigError(f"{where}: eyas has no sliding-window drafter; set sliding_window to null")
    values.pop("use_sliding_window", None)
    if set(values.pop("layer_types", None) or ()) - {"full_attention"}:
        raise ConfigError(f"{where}: only full_attention drafter layers are supported")
    for name, fallback in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        if values.get(name) is None:
            values[name] = values.get(fallback)


def read_grouped_heads(values: dict[str, Any]) -> None:
    """Fill in the head size and the number of key-value heads."""
    heads, size = values.get("num_attention_heads"), values.get("hidden_size")
    if not values.get("head_dim") and isinstance(heads, int) and heads > 0 and isinstance(size, int):
        values["head_dim"] = size // heads
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads


def finish(cls: type[ConfigT], values: dict[str, Any], where: str) -> ConfigT:
    """Validate; refuse keys nobody has read."""
    unknown = sorted(set(values) - set(cls.model_fields))
    if unknown:
        raise ConfigError(
            f"{where}: unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}: eyas can't tell whether the drafter "
            "computes something else because of it; if it does not, name it with --ignore-config-key"
        )
    return validated(cls, values, where)


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


def _pop_rope(values: dict[str, Any]) -> dict[str, Any]:
    """RoPE from `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old); theta may sit in either."""
    rope = dict(values.pop("rope_parameters", None) or values.pop("rope_scaling", None) or {})
    values.pop("rope_scaling", None)
    theta = values.pop("rope_theta", None)
    rope.setdefault("rope_theta", theta if theta is not None else 10000.0)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    return rope
