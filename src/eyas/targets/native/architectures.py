"""Which transformers models are decoders of Llama's kind, to be run as native passes, and how they are taken apart.

Layers are recognised by what they consist of, never by a model's name: the names of their norms say where they stand,
and what else a family does (factors, layers without RoPE, two RoPE tables) by the attributes that do it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.architecture import attention_plan, context_limit, decoder_layers, text_decoder
from eyas.targets.native.decoder import Heads, LayerParts, NativeDecoder, RopeTables, RoutedExperts
from eyas.targets.native.experts import NativeExperts, NativeRouter
from eyas.targets.native.forms import is_gelu
from eyas.targets.native.latent import PARTS, LatentHeads, latent_heads

_LOG = logging.getLogger("eyas")

_NORMS: tuple[Mapping[str, str], ...] = (
    {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"},  # Llama and most others
    {  # Gemma
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    },
    {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "mlp_out_norm"},  # OLMo
)
"""A layer's norms by name, and which part of `LayerParts` each is."""
_SEPARATE = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
_FUSED = {"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"}
"""The linears of attention and MLP, each by itself or those with one input as one."""
_SHARED = ("shared_expert", "shared_experts")
"""What the expert that all tokens share is called."""


def transformers_decoder(model: Any) -> NativeDecoder | None:
    """A transformers causal LM whose linears are native as a native decoder; None for other kinds of layers."""
    try:
        return _transformers_decoder(model)
    except (UnsupportedModelError, AttributeError, TypeError, KeyError) as error:
        _LOG.debug("no native passes: %s", error)
        return None


def _transformers_decoder(model: Any) -> NativeDecoder:
    base, config = text_decoder(model), model.config.get_text_config()
    layers, plan = decoder_layers(model, config.num_hidden_layers), attention_plan(config)
    types = config.layer_types if plan.hybrid else list(plan.windows) * len(layers)
    _check_children(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
    kinds = sorted(set(types))
    attention: Any = layers[0].self_attn
    latent, size, groups = LatentHeads(), getattr(attention, "head_dim", 0), config.num_key_value_heads
    if hasattr(attention, "kv_a_proj_with_mqa"):
        latent, tables = latent_heads(attention, base.rotary_emb, model.dtype)
        size, groups, ropes = attention.qk_head_dim, 1, [tables]
    else:
        ropes = _rope_tables(base.rotary_emb, kinds, torch.empty(0, dtype=model.dtype))
    parts, gelus, factors = [], set(), set()
    layer: Any
    for layer, kind in zip(layers, types, strict=True):
        rope = kinds.index(kind) if len(ropes) > 1 else 0
        parts.append(
            LayerParts(
                layer.self_attn,
                **_mlp_parts(layer.mlp),
                **_layer_norms(layer),
                window=plan.windows[kind],
                rope=rope if getattr(layer.self_attn, "use_rope", True) else None,
                sinks=getattr(layer.self_attn, "sinks", None),
            )
        )
        mlp = parts[-1].mlp
        if mlp is not None:
            gelus.add(is_gelu(getattr(mlp, "act_fn", None) or mlp.activation_fn))
        factors.add(float(getattr(layer, "residual_multiplier", 1.0)))
    if len(gelus) > 1 or len(factors) > 1:
        raise UnsupportedModelError("layers differ in their activation or in the factor of what they add")
    if getattr(config, "clip_qkv", None):
        raise UnsupportedModelError("queries, keys and values are clipped")
    heads = Heads(
        config.num_attention_heads, groups, size, float(attention.scaling),
        float(getattr(attention, "attn_logit_softcapping", None) or 0.0), latent,
    )  # fmt: skip
    return NativeDecoder(
        parts, base.norm, model.get_output_embeddings(), heads, ropes, base.embed_tokens.weight.detach(), model.dtype,
        limit=context_limit(config), gelu=True in gelus, residual_scale=factors.pop(),
        embedding_scale=_embedding_scale(base),
    )  # fmt: skip


def _layer_norms(layer: Any) -> dict[str, Any]:
    """The norms of a layer that has no other parts but attention and an MLP of Llama's kind."""
    children = {name for name, child in layer.named_children() if not isinstance(child, nn.Dropout)}
    names = next((names for names in _NORMS if children == {"self_attn", "mlp", *names}), None)
    if names is None:
        raise UnsupportedModelError(f"{type(layer).__name__} has the parts {sorted(children)}")
    of_attention, of_mlp = _FUSED if hasattr(layer.self_attn, "qkv_proj") else _SEPARATE
    if {name for name, _ in layer.self_attn.named_children()} not in PARTS:
        _check_children(layer.self_attn, of_attention, {"q_norm", "k_norm", "rotary_emb"})
    if not isinstance(getattr(layer.mlp, "experts", None), NativeExperts):
        _check_children(layer.mlp, of_mlp, {"act_fn", "activation_fn"})
    if dict(layer.self_attn.named_parameters(recurse=False)).keys() - {"sinks"}:
        raise UnsupportedModelError(f"{type(layer.self_attn).__name__} has parameters of its own")
    norms: dict[str, Any] = {"input_norm": None, "mlp_norm": None}
    return norms | {part: getattr(layer, name) for name, part in names.items()}


def _mlp_parts(mlp: Any) -> dict[str, Any]:
    """An MLP, or experts with their router and, where there is one, the expert that all tokens share."""
    if not isinstance(getattr(mlp, "experts", None), NativeExperts):
        return {"mlp": mlp}
    router = "router" if hasattr(mlp, "router") else "gate"
    _check_children(mlp, {"experts", router}, {*_SHARED, "shared_expert_gate"})
    shared = next((getattr(mlp, name) for name in _SHARED if getattr(mlp, name, None) is not None), None)
    if shared is not None:
        _check_children(shared, _SEPARATE[1], {"act_fn"})
    gate = getattr(mlp, router)
    if not isinstance(gate, NativeRouter):
        raise UnsupportedModelError(f"{type(gate).__name__} chooses experts in a way of its own")
    routed = RoutedExperts(mlp.experts, gate, getattr(mlp, "shared_expert_gate", None))
    return {"mlp": shared, "routed": routed}


def _check_children(module: nn.Module, needed: set[str], allowed: Collection[str] = ()) -> None:
    found = {name for name, _ in module.named_children()}
    if not needed <= found or found - needed - set(allowed):
        raise UnsupportedModelError(f"{type(module).__name__} has the parts {sorted(found)}")


def _rope_tables(rotary: Any, types: list[str], probe: Tensor) -> list[RopeTables]:
    """One table for all layers, or one for each of the attention `types`."""
    if "layer_type" not in signature(rotary.forward).parameters:
        found: list[RopeTables] = [partial(rotary, probe)]
    else:
        found = [partial(rotary, probe, layer_type=kind) for kind in types]
    return [partial(_both_halves, tables) if _one_half(tables) else tables for tables in found]


def _one_half(tables: RopeTables) -> bool:
    """Whether tables have entries for the first half of a head's rotated features only; the second has the same.

    Raises UnsupportedModelError if they aren't cosines and sines.
    """
    made: Any = tables(torch.arange(9).unsqueeze(0))
    if not isinstance(made, tuple):
        raise UnsupportedModelError("RoPE isn't given by cosines and sines")
    cosines, _ = made
    left, right = cosines.tensor_split(2, dim=-1)
    return left.shape != right.shape or not left.equal(right)


def _both_halves(tables: RopeTables, positions: Tensor) -> tuple[Tensor, Tensor]:
    cosines, sines = tables(positions)
    return torch.cat((cosines, cosines), dim=-1), torch.cat((sines, sines), dim=-1)


def _embedding_scale(base: Any) -> float:
    """The factor by which a decoder multiplies its embeddings: in the embedding itself, or after it."""
    embedding, multiplier = base.embed_tokens, float(getattr(base, "embedding_multiplier", 1.0))
    if type(embedding) is nn.Embedding:
        return multiplier
    scale = getattr(embedding, "embed_scale", None)
    if not isinstance(scale, Tensor) or multiplier != 1.0:
        raise UnsupportedModelError(f"{type(embedding).__name__} is no plain embedding")
    return float(scale.to(embedding.weight.dtype))
