"""Translating the configurations of vLLM's `speculators` library into native keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import LlamaConfig, Qwen3Config

from eyas.errors import CheckpointError, ConfigError

MODEL_TYPE_KEY = "speculators_model_type"
LAYER = "transformer_layer_config"
TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of the target that the library keeps beside the drafter while it trains."""

PEAGLE_ARCHITECTURES = {"llama": "PeagleLlamaForCausalLM", "qwen3": "PeagleQwen3ForCausalLM"}
ALGORITHMS = {
    "eagle3": {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"},
    "peagle": PEAGLE_ARCHITECTURES,
}
"""Algorithm of the library -> the type of its layers -> the architecture in native keys."""
_COPIED = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "mask_token_id",
    "default_tree",
    "taps",
    "eyas",
    "auto_map",
    "quantization_config",
)
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
_AMBIGUOUS = (
    "norm_before_residual is not written: read as true, as vLLM does; the speculators library's own default is false: "
    "write it into config.json to settle it"
)


class Translated(NamedTuple):
    """A configuration in native keys, and what became of the library's keys; see `LoadReport`."""

    config: dict[str, Any]
    used: list[str]
    ignored: dict[str, str]
    defaulted: dict[str, Any]
    doubts: list[str]


def translate(raw: dict[str, Any], where: str) -> Translated:
    """Translate a config.json of the library. Raises ConfigError, and CheckpointError for another algorithm."""
    algorithm = raw.get(MODEL_TYPE_KEY)
    known = ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if known is None:
        raise CheckpointError(
            f"{where}: {MODEL_TYPE_KEY} {algorithm!r}: of the speculators library's algorithms eyas loads "
            f"{' and '.join(ALGORITHMS)}"
        )
    layer = raw.get(LAYER)
    if not isinstance(layer, dict):
        raise ConfigError(f"{where}: {LAYER} must be an object: the shape of the decoder layer")
    proposal = raw.get("speculators_config") or {}
    if not isinstance(proposal, dict) or proposal.get("algorithm", algorithm) != algorithm:
        raise ConfigError(f"{where}: speculators_config is not that of a drafter of the algorithm {algorithm}")
    kind = layer.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(f"{where}: {LAYER}.model_type {kind!r}: eyas loads {' and '.join(known)} layers")
    standard = (Qwen3Config() if kind == "qwen3" else LlamaConfig()).to_dict()
    missing = {key: standard.get(key, False) for key in _LAYER_DEFAULTS if layer.get(key) is None}
    if layer.get("head_dim") is None and kind == "qwen3":
        missing["head_dim"] = standard["head_dim"]
    config = {**layer, **missing, **{key: raw[key] for key in _COPIED if key in raw}}
    doubts = []
    if raw.get("norm_before_residual") is None and algorithm == "eagle3":
        config["norm_before_residual"] = True
        doubts.append(_AMBIGUOUS)
    if algorithm == "peagle":
        config |= _depths(proposal)
    unknown = set(raw) - {*_COPIED, *_DESCRIPTIVE, MODEL_TYPE_KEY, LAYER, "speculators_config"}
    config |= {key: raw[key] for key in unknown}  # refused by name where the rest is read
    config |= {"architectures": [known[kind]], "model_type": kind, "tie_word_embeddings": False}
    ignored = {key: why for key, why in _DESCRIPTIVE.items() if key in raw}
    ignored["speculators_config"] = "how vLLM is to draft, and the name of the target"
    used = [MODEL_TYPE_KEY, *(key for key in _COPIED if key in raw), *(f"{LAYER}.{key}" for key in layer)]
    return Translated(config, used, ignored, {f"{LAYER}.{key}": value for key, value in missing.items()}, doubts)


def _depths(proposal: dict[str, Any]) -> dict[str, Any]:
    """The guesses of one pass, if the library's proposal says how many the drafter was trained for."""
    methods = proposal.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    depths = first.get("speculative_tokens") if isinstance(first, dict) else None
    return {} if depths is None else {"num_depths": depths}
