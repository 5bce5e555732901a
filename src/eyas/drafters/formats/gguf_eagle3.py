"""llama.cpp's `eagle3` files: their tensors and keys."""

from __future__ import annotations

from typing import Any

from eyas.drafters.formats.gguf_layout import LAYERS, SIZES, GgufLayout, read_boundaries
from eyas.errors import ConfigError
from eyas.gguf import Gguf

_TENSORS = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    "blk.0.attn_norm.weight": "layers.0.input_layernorm.weight",
    "blk.0.attn_norm_2.weight": "layers.0.hidden_norm.weight",
    "blk.0.attn_q.weight": "layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "layers.0.mlp.down_proj.weight",
    "d2t": "d2t",
}
_OLD_LAYERS = "extract_layers"
"""The older key of the boundaries that the drafter reads."""


def _settings(file: Gguf, own: dict[str, Any], where: str) -> dict[str, Any]:  # noqa: ARG001
    """The taps, and by which names the network is recognised. Raises ConfigError."""
    if LAYERS in own and _OLD_LAYERS in own and own[LAYERS] != own[_OLD_LAYERS]:
        raise ConfigError(f"{where}: {LAYERS} {own[LAYERS]} and {_OLD_LAYERS} {own[_OLD_LAYERS]} contradict each other")
    taps = read_boundaries({LAYERS: own.get(LAYERS, own.get(_OLD_LAYERS))}, where, 3)
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "taps": taps}


LAYOUT = GgufLayout(
    architecture="eagle3",
    title="EAGLE-3",
    tensors=_TENSORS,
    keys=SIZES | {key: key for key in ("target_hidden_size", "norm_before_residual", "norm_before_fc")},
    more_keys=frozenset({_OLD_LAYERS}),
    settings=_settings,
    interleaved=True,
)
