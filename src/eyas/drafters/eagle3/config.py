"""What an EAGLE-3 drafter is made of, read from the field's config.json (EAGLE-3, and 3.1 as toggles on it).

Only fields that change the computation are kept. Absent 3.1 fields mean plain EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import Field

from eyas.config import StrictModel, validated
from eyas.errors import ConfigError

# Keys of published config.json files that say nothing about the computation.
_DESCRIPTIVE = frozenset(
    "architectures model_type dtype torch_dtype transformers_version _name_or_path name_or_path auto_map bos_token_id "
    "eos_token_id pad_token_id use_cache initializer_range pretraining_tp return_dict output_hidden_states "
    "output_attentions chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type mlp_only_layers "
    "attention_dropout target_model_type max_window_layers eyas use_return_dict tie_encoder_decoder "
    "tokenizer_class".split()
)


class Eagle3Config(StrictModel):
    """Sizes and toggles; `taps` are target boundaries (boundary k = residual entering layer k)."""

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    vocab_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    target_hidden_size: int = Field(ge=1)
    num_aux_hidden_states: int = Field(default=3, ge=1)
    num_hidden_layers: int = Field(default=1, ge=1)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    hidden_act: str = "silu"
    max_position_embeddings: int = Field(default=2048, ge=1)
    rope_parameters: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    taps: tuple[int, ...] | None = None
    """None = not written in the checkpoint: the default boundaries of the target."""
    default_tree: str | None = None
    """The tree setting the drafter was tuned for, if any."""


def config_from_dict(raw: dict[str, Any], where: str, ignore: Collection[str] = ()) -> Eagle3Config:
    """Read a checkpoint's config.json; refuse a key that is neither known nor named in `ignore`."""
    values = {k: v for k, v in raw.items() if k not in _DESCRIPTIVE and k not in ignore}
    values["rope_parameters"] = _pop_rope(values)
    values["taps"] = _pop_taps(values, where)
    if values.pop("tie_word_embeddings", False):
        raise ConfigError(f"{where}: tie_word_embeddings is true, but an EAGLE-3 head is never its embedding")
    if values.pop("sliding_window", None) is not None and values.pop("use_sliding_window", True):
        raise ConfigError(f"{where}: eyas has no sliding-window EAGLE-3 drafter; set sliding_window to null")
    values.pop("use_sliding_window", None)
    if set(values.pop("layer_types", None) or ()) - {"full_attention"}:
        raise ConfigError(f"{where}: only full_attention drafter layers are supported")
    values.pop("bias", None)  # an EAGLE-1 field; an fc.bias tensor would be reported as an extra tensor
    heads, size = values.get("num_attention_heads"), values.get("hidden_size")
    if not values.get("head_dim") and isinstance(heads, int) and heads > 0 and isinstance(size, int):
        values["head_dim"] = size // heads
    values.setdefault("num_key_value_heads", heads)
    for name, fallback in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        if values.get(name) is None:
            values[name] = values.get(fallback)
    if values.get("num_aux_hidden_states") is None:
        values["num_aux_hidden_states"] = len(values["taps"]) if values["taps"] else 3
    unknown = sorted(set(values) - set(Eagle3Config.model_fields))
    if unknown:
        raise ConfigError(
            f"{where}: unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}: eyas can't tell whether the drafter "
            "computes something else because of it; if it does not, name it with --ignore-config-key"
        )
    return validated(Eagle3Config, values, where)


def _pop_rope(values: dict[str, Any]) -> dict[str, Any]:
    """RoPE from `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old); theta may sit in either."""
    rope = dict(values.pop("rope_parameters", None) or values.pop("rope_scaling", None) or {})
    values.pop("rope_scaling", None)
    theta = values.pop("rope_theta", None)
    rope.setdefault("rope_theta", theta if theta is not None else 10000.0)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    return rope


def _pop_taps(values: dict[str, Any], where: str) -> tuple[int, ...] | None:
    """Tap boundaries from our key, or the field's, flat or nested; other nested keys come up to the top level."""
    nested = dict(values.pop("eagle_config", None) or {})
    if not nested.pop("use_aux_hidden_state", True):
        raise ConfigError(f"{where}: use_aux_hidden_state is false, but an EAGLE-3 drafter reads the target's taps")
    found = [
        tuple(ids)
        for ids in (
            values.pop("taps", None),
            values.pop("eagle_aux_hidden_state_layer_ids", None),
            nested.pop("eagle_aux_hidden_state_layer_ids", None),
            nested.pop("layer_ids", None),
        )
        if ids is not None
    ]
    for key, value in nested.items():  # some exporters nest toggles such as norm_before_fc
        if values.setdefault(key, value) != value:
            raise ConfigError(f"{where}: {key} is {values[key]} at the top level and {value} in eagle_config")
    if len(set(found)) > 1:
        raise ConfigError(f"{where}: contradicting tap lists {found}: keep one")
    return found[0] if found else None


def config_to_dict(config: Eagle3Config) -> dict[str, Any]:
    """The config.json form that vLLM, SGLang and eyas read: RoPE in both places, taps in both places."""
    values = config.model_dump(exclude={"taps", "default_tree"}, exclude_none=True)
    values["architectures"] = ["LlamaForCausalLMEagle3"]
    values["model_type"] = "llama"
    values["tie_word_embeddings"] = False
    values["rope_theta"] = config.rope_parameters["rope_theta"]
    if config.taps is not None:
        values["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
        values["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "use_aux_hidden_state": True,
        }
    if config.default_tree is not None:
        values["default_tree"] = config.default_tree
    return values
