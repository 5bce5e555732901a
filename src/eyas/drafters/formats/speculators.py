"""Translating the configurations of vLLM's `speculators` library into native keys.

The shape of the decoder layers stands in a section of its own, which leaves out what is transformers' default; what
depends on the algorithm stands at the top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from eyas.drafters.files import KeyReport
from eyas.errors import CheckpointError, ConfigError

MODEL_TYPE_KEY = "speculators_model_type"
LAYER = "transformer_layer_config"
TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the target that the library keeps beside the drafter while it trains."""
BOUNDARIES_KEY = "aux_hidden_state_layer_ids"
"""The boundaries that a block drafter of the library reads."""
SLIDING_KEY = "sliding_window_non_causal"
"""How layers with a sliding window see a block; vLLM's DFlash takes it for all layers, the library for those alone."""


@dataclass(frozen=True)
class Algorithm:
    """One of the library's algorithms: its keys, and the network that it means."""

    architectures: Mapping[str, str]
    """Model type of the decoder layer -> the architecture under which native files name the network."""
    default_layer: str
    """The model type of layers that don't say theirs."""
    keys: tuple[str, ...]
    """Its keys at the top level, whose native names are the same."""
    required: tuple[str, ...] = ()
    """Those of them without which the drafter can't be read."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Its keys that change nothing, with the reason."""
    ambiguous: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Keys that readers have different defaults for: what a missing one is taken for, and the doubt to report."""
    guesses: str = ""
    """The native key of the guesses of one pass, which the library's proposal names; empty if there is none."""


PEAGLE_ARCHITECTURES = {"llama": "PeagleLlamaForCausalLM", "qwen3": "PeagleQwen3ForCausalLM"}
_COPIED = ("draft_vocab_size", "target_hidden_size", "default_tree", "taps", "eyas", "auto_map", "quantization_config")
"""Keys that every algorithm has."""
_TOGGLES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")
_BLOCK = ("block_size", "mask_token_id", BOUNDARIES_KEY, "sample_from_anchor")
_SLIDING = {SLIDING_KEY: "about layers with a sliding window"}
ALGORITHMS = {
    "eagle3": Algorithm(
        {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"},
        "llama",
        _TOGGLES,
        ambiguous={"norm_before_residual": (True,
            "norm_before_residual is not written: read as true, as vLLM does; the speculators library's own default is "
            "false: write it into config.json to settle it")},
    ),
    "peagle": Algorithm(PEAGLE_ARCHITECTURES, "llama", (*_TOGGLES, "mask_token_id"), guesses="num_depths"),
    "dflash": Algorithm(
        dict.fromkeys(("llama", "qwen3"), "DFlashDraftModel"), "qwen3", _BLOCK, _BLOCK[:3], _SLIDING,
    ),
    "dflash2": Algorithm(
        {"qwen3": "DFlash2DraftModel"}, "qwen3",
        (*_BLOCK, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), _BLOCK[:3], _SLIDING,
    ),
    "dspark": Algorithm(
        dict.fromkeys(("llama", "qwen3"), "Qwen3DSparkModel"),
        "qwen3",
        (*_BLOCK, "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
        _BLOCK[:3],
        _SLIDING,
        {"sample_from_anchor": (False,
            "sample_from_anchor is not written: read as false, as vLLM and older versions of speculators do; the "
            "library's own default is true now: write it into config.json to settle it")},
    ),
}  # fmt: skip
"""Each algorithm that is read, by the library's name for it, which is the kind's, too."""
_DESCRIPTIVE = {
    "architectures": "descriptive",
    "speculators_version": "descriptive",
    "torch_dtype": "descriptive",
    "dtype": "descriptive",
    "transformers_version": "descriptive",
    "model_type": "descriptive",
    "tie_word_embeddings": "of the library's own model class: embedding and head are never tied",
    "has_no_defaults_at_init": "descriptive",
    "embed_requires_grad": "about training",
    "enable_sp_ulysses": "about training",
}
_LAYER_DEFAULTS = (
    "hidden_size intermediate_size num_attention_heads num_hidden_layers rms_norm_eps hidden_act "
    "max_position_embeddings attention_bias mlp_bias vocab_size".split()
)
"""Keys of the layer that the library leaves out where they have transformers' defaults."""
_QWEN3_DEFAULTS = ("head_dim", "num_key_value_heads")
"""Further ones that have a number as their default in Qwen3's layers; Llama's follow from other sizes."""


@dataclass
class Translated(KeyReport):
    """A configuration in native keys, and what became of the library's keys."""

    config: dict[str, Any]
    used: list[str]


def translate(raw: dict[str, Any], where: str) -> Translated:
    """Translate a config.json of the library. Raises ConfigError, and CheckpointError for another algorithm."""
    name = raw.get(MODEL_TYPE_KEY)
    algorithm = ALGORITHMS.get(name) if isinstance(name, str) else None
    if algorithm is None:
        raise CheckpointError(
            f"{where}: {MODEL_TYPE_KEY} {name!r}: of the speculators library's algorithms eyas loads "
            + ", ".join(ALGORITHMS)
        )
    layer = raw.get(LAYER)
    if not isinstance(layer, dict):
        raise ConfigError(f"{where}: {LAYER} must be an object: the shape of the decoder layer")
    proposal = raw.get("speculators_config") or {}
    if not isinstance(proposal, dict) or proposal.get("algorithm", name) != name:
        raise ConfigError(f"{where}: speculators_config is not that of an {name} drafter")
    if missing_keys := [key for key in algorithm.required if raw.get(key) is None]:
        raise ConfigError(f"{where}: {', '.join(missing_keys)} must be written: it has no default in an {name} drafter")
    kind = layer.get("model_type", algorithm.default_layer)
    if not isinstance(kind, str) or kind not in algorithm.architectures:
        known = " and ".join(algorithm.architectures)
        raise CheckpointError(f"{where}: {LAYER}.model_type {kind!r}: eyas loads {known} layers")
    missing = _layer_defaults(kind, layer)
    copied = (*_COPIED, *algorithm.keys)
    config = {**layer, **missing, **{key: raw[key] for key in copied if key in raw}}
    doubts = []
    for key, (value, doubt) in algorithm.ambiguous.items():
        if raw.get(key) is None:
            config[key] = value
            doubts.append(doubt)
    if algorithm.guesses:
        config |= _guesses(proposal, algorithm.guesses)
    descriptive = {**_DESCRIPTIVE, **algorithm.ignored}
    unknown = set(raw) - {*copied, *descriptive, MODEL_TYPE_KEY, LAYER, "speculators_config"}
    config |= {key: raw[key] for key in unknown}  # refused by name where the rest is read
    config |= {"architectures": [algorithm.architectures[kind]], "model_type": kind, "tie_word_embeddings": False}
    ignored = {key: why for key, why in descriptive.items() if key in raw}
    ignored["speculators_config"] = "how vLLM is to draft, and the name of the target"
    used = [MODEL_TYPE_KEY, *(key for key in copied if key in raw), *(f"{LAYER}.{key}" for key in layer)]
    defaulted = {f"{LAYER}.{key}": value for key, value in missing.items()}
    return Translated(config, used, ignored=ignored, defaulted=defaulted, doubts=doubts)


def _layer_defaults(kind: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer of this model type leaves out, with transformers' defaults."""
    standard = (Qwen3Config() if kind == "qwen3" else LlamaConfig()).to_dict()
    keys = [*_LAYER_DEFAULTS, *(_QWEN3_DEFAULTS if kind == "qwen3" else ())]
    return {key: standard.get(key, False) for key in keys if layer.get(key) is None}


def _guesses(proposal: dict[str, Any], key: str) -> dict[str, Any]:
    """The guesses of one pass, if the library's proposal says how many the drafter was trained for."""
    methods = proposal.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    depths = first.get("speculative_tokens") if isinstance(first, dict) else None
    return {} if depths is None else {key: depths}
