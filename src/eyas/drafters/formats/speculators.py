"""Translating the configurations of vLLM's `speculators` library into native keys.

The shape of the decoder layers is in its own section, which omits transformers' defaults; keys that depend on the
algorithm are at the top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from eyas.drafters.files import KeyReport
from eyas.drafters.formats.windows import ANCHORED
from eyas.drafters.window.layers import SLIDING_LAYER
from eyas.errors import CheckpointError, ConfigError

MODEL_TYPE_KEY = "speculators_model_type"
LAYER = "transformer_layer_config"
TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the target that the library saves with the drafter for training."""
BOUNDARIES_KEY = "aux_hidden_state_layer_ids"
"""The key of the boundaries that a block drafter of the library reads."""
SLIDING_KEY = "sliding_window_non_causal"
"""How layers with a sliding window see a block; vLLM applies it to all layers, the library to these only."""


@dataclass(frozen=True)
class Algorithm:
    """One of the library's algorithms: its keys, and the network that it stands for."""

    architectures: Mapping[str, str]
    """Model type of the decoder layer -> the network's architecture name in native files."""
    default_layer: str
    """The model type of layers that name none."""
    keys: tuple[str, ...]
    """Its keys at the top level, which have the same native names."""
    required: tuple[str, ...] = ()
    """The keys among them that must be present."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Its keys that change nothing, with the reason."""
    ambiguous: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Keys for which readers have different defaults -> the value of a missing one, and the doubt to report."""
    guesses: str = ""
    """The native key for the number of guesses of one pass, from the library's proposal; empty if there is none."""
    anchored: bool = True
    """Whether the library trains with sliding windows that count from where a draft begins, not from each guess."""
    non_causal: bool | None = None
    """A block drafter's default of `SLIDING_KEY` in the library; None = another drafter."""


PEAGLE_ARCHITECTURES = {"llama": "PeagleLlamaForCausalLM", "qwen3": "PeagleQwen3ForCausalLM"}
_COPIED = ("draft_vocab_size", "target_hidden_size", "default_tree", "taps", "eyas", "auto_map", "quantization_config")
"""Keys that every algorithm has."""
_TOGGLES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")
_BLOCK = ("block_size", "mask_token_id", BOUNDARIES_KEY, "sample_from_anchor")
ALGORITHMS = {
    "eagle3": Algorithm(
        {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"},
        "llama",
        _TOGGLES,
        ambiguous={"norm_before_residual": (True,
            "norm_before_residual is missing: read as true, as vLLM does; the speculators library's own default is "
            "false: write it into config.json to settle it")},
    ),
    "peagle": Algorithm(
        PEAGLE_ARCHITECTURES, "llama", (*_TOGGLES, "mask_token_id"), guesses="num_depths", anchored=False,
    ),
    "dflash": Algorithm(
        dict.fromkeys(("llama", "qwen3"), "DFlashDraftModel"), "qwen3", _BLOCK, _BLOCK[:3], non_causal=False,
    ),
    "dflash2": Algorithm(
        {"qwen3": "DFlash2DraftModel"}, "qwen3",
        (*_BLOCK, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), _BLOCK[:3],
        non_causal=True,
    ),
    "dspark": Algorithm(
        dict.fromkeys(("llama", "qwen3"), "Qwen3DSparkModel"),
        "qwen3",
        (*_BLOCK, "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
        _BLOCK[:3],
        non_causal=False,
        ambiguous={"sample_from_anchor": (False,
            "sample_from_anchor is missing: read as false, as vLLM and older versions of speculators do; the "
            "library's own default is true now: write it into config.json to settle it")},
    ),
}  # fmt: skip
"""The supported algorithms, by the library's name, which is also the kind's."""
_DESCRIPTIVE = {
    "architectures": "descriptive",
    "speculators_version": "descriptive",
    "torch_dtype": "descriptive",
    "dtype": "descriptive",
    "transformers_version": "descriptive",
    "model_type": "descriptive",
    "tie_word_embeddings": "for the library's own model class: embedding and head are never tied",
    "has_no_defaults_at_init": "descriptive",
    "embed_requires_grad": "about training",
    "enable_sp_ulysses": "about training",
}
_LAYER_DEFAULTS = (
    "hidden_size intermediate_size num_attention_heads num_hidden_layers rms_norm_eps hidden_act "
    "max_position_embeddings attention_bias mlp_bias vocab_size".split()
)
"""Keys of the layer that the library omits if they have transformers' defaults."""
_QWEN3_DEFAULTS = ("head_dim", "num_key_value_heads")
"""Further keys with fixed defaults in Qwen3's layers; in Llama's they follow from other sizes."""


@dataclass
class Translated(KeyReport):
    """A configuration in native keys, and how the library's keys were treated."""

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
        raise ConfigError(f"{where}: speculators_config must be an object whose algorithm, if written, is {name}")
    if missing_keys := [key for key in algorithm.required if raw.get(key) is None]:
        raise ConfigError(f"{where}: {', '.join(missing_keys)} must be written: {name} drafters have no default")
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
    used = [MODEL_TYPE_KEY, *(key for key in copied if key in raw), *(f"{LAYER}.{key}" for key in layer)]
    descriptive = {**_DESCRIPTIVE, **algorithm.ignored}
    windowed = SLIDING_LAYER in str(config.get("layer_types")) or bool(config.get("use_sliding_window"))
    if windowed and algorithm.anchored:
        config[ANCHORED] = True
    if algorithm.non_causal is not None:
        if windowed:
            config |= _causality(raw, algorithm.non_causal, where, doubts)
            used += [SLIDING_KEY] if SLIDING_KEY in raw else []
        else:
            descriptive |= {SLIDING_KEY: "about layers with a sliding window"}
    unknown = set(raw) - {*copied, *descriptive, *used, LAYER, "speculators_config"}
    config |= {key: raw[key] for key in unknown}  # refused by name later, with the other keys
    config |= {"architectures": [algorithm.architectures[kind]], "model_type": kind, "tie_word_embeddings": False}
    ignored = {key: why for key, why in descriptive.items() if key in raw}
    ignored["speculators_config"] = "how vLLM is to draft, and the name of the target"
    defaulted = {f"{LAYER}.{key}": value for key, value in missing.items()}
    return Translated(config, used, ignored=ignored, defaulted=defaulted, doubts=doubts)


def _layer_defaults(kind: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a layer of this model type omits, with transformers' defaults."""
    standard = (Qwen3Config() if kind == "qwen3" else LlamaConfig()).to_dict()
    keys = [*_LAYER_DEFAULTS, *(_QWEN3_DEFAULTS if kind == "qwen3" else ())]
    return {key: standard.get(key, False) for key in keys if layer.get(key) is None}


def _causality(raw: Mapping[str, Any], non_causal: bool, where: str, doubts: list[str]) -> dict[str, Any]:
    """Whether slots see later ones, in native keys: `is_causal` is left out where only layers with a window are causal.

    Raises ConfigError.
    """
    written = raw.get(SLIDING_KEY)
    if written is None:
        doubts.append(
            f"{SLIDING_KEY} is missing: read as {str(non_causal).lower()}, as the speculators library does; vLLM takes "
            "true: write it into config.json to settle it"
        )
    elif not isinstance(written, bool):
        raise ConfigError(f"{where}: {SLIDING_KEY} is {written!r}, not true or false")
    both_ways = non_causal if written is None else written
    return {"is_causal": False} if both_ways else {}


def _guesses(proposal: dict[str, Any], key: str) -> dict[str, Any]:
    """The number of guesses of one pass under the native `key`, if the library's proposal gives it."""
    methods = proposal.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    depths = first.get("speculative_tokens") if isinstance(first, dict) else None
    return {} if depths is None else {key: depths}
