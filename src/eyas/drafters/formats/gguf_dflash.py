"""llama.cpp's `dflash` files, which hold DFlash or DSpark drafters: their tensors and keys."""

from __future__ import annotations

from typing import Any

from eyas.drafters.formats.gguf_layout import SIZES, GgufLayout, read_boundaries
from eyas.errors import CheckpointError, ConfigError
from eyas.gguf import Gguf

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_HEAD, _EMBEDDING, _MARKOV, _CONFIDENCE = "output.weight", "token_embd.weight", "markov_w1.weight", "conf_proj.weight"
_TENSORS = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    _HEAD: "lm_head.weight",
    _EMBEDDING: "embed_tokens.weight",
    **{f"blk.{{}}.{theirs}": f"layers.{{}}.{ours}" for theirs, ours in _LAYER.items()},
    "d2t": "d2t",
    _MARKOV: "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    _CONFIDENCE: "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}
MASK = "tokenizer.ggml.mask_token_id"
"""The key of the token whose embedding stands in the slots that follow the anchor."""
_CAUSAL, _SECTIONS = "attention.causal", "rope.dimension_sections"
_ANCHOR, _CONFIDENT = "sample_from_anchor", "has_confidence_head"


def _settings(file: Gguf, own: dict[str, Any], where: str) -> dict[str, Any]:
    """Taps, mask token and heads, and by which names the network is recognised. Raises CheckpointError, ConfigError."""
    if own.get(_CAUSAL, False) is not False:
        raise ConfigError(f"{where}: {_CAUSAL} is not false, but slots of a block attend to each other both ways")
    sections = own.get(_SECTIONS, [0])
    if not isinstance(sections, list) or any(sections[1:]):
        raise ConfigError(f"{where}: {_SECTIONS} {sections}: eyas rotates by one position a token")
    if _EMBEDDING in file.tensors and _HEAD not in file.tensors:
        raise CheckpointError(
            f"{where} has {_EMBEDDING} without {_HEAD}: llama.cpp takes the embedding for the head then, which is no "
            "reading of a drafter; convert it again with both, or with neither"
        )
    config: dict[str, Any] = {"model_type": "qwen3", "taps": read_boundaries(own, where)}
    config["mask_token_id"] = file.metadata.get(MASK)
    markov, confidence = file.tensors.get(_MARKOV), file.tensors.get(_CONFIDENCE)
    if markov is None:
        if own.get(_ANCHOR, False) is not False:
            raise ConfigError(f"{where}: {_ANCHOR} is true, but llama.cpp's DFlash blocks begin with a known token")
        return config | {"architectures": ["DFlashDraftModel"]}
    config["markov_rank"] = markov.shape[-1]
    config["enable_confidence_head"] = confidence is not None
    if own.get(_CONFIDENT, confidence is not None) is not (confidence is not None):
        raise ConfigError(f"{where}: {_CONFIDENT} is {own[_CONFIDENT]}, but the tensors say otherwise")
    if confidence is not None:
        config["confidence_head_with_markov"] = confidence.shape[-1] != own.get("embedding_length")
    return config | {"architectures": ["Qwen3DSparkModel"], _ANCHOR: own.get(_ANCHOR, True)}


LAYOUT = GgufLayout(
    architecture="dflash",
    title="DFlash or DSpark",
    tensors=_TENSORS,
    keys=SIZES | {"block_size": "block_size", "hidden_activation": "hidden_act"},
    more_keys=frozenset({_CAUSAL, _SECTIONS, _ANCHOR, _CONFIDENT}),
    settings=_settings,
    interleaved=False,
)
HEADS = {_ANCHOR: "sample_from_anchor", _CONFIDENT: "enable_confidence_head"}
"""Keys that only a file with a Markov head has -> config field of the same meaning."""
