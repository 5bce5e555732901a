"""Which transformers models are Llama-like decoders that native passes can run, and how they are taken apart.

Layers are recognized by their parts, never by a model's name. The names of their norms say where the norms are, and
attributes show what else a family does (factors, two RoPE tables). Which table rotates a layer's queries, if any, is
tried afterwards (`layer_trials`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.architecture import attention_plan, context_limit, decoder_layers, text_decoder
from eyas.targets.native.decoder import (
    DecoderDescription,
    DecoderForm,
    Heads,
    LayerFactors,
    LayerParts,
    NativeDecoder,
    RopeTables,
    RoutedExperts,
)
from eyas.targets.native.experts import NativeExperts, NativeRouter
from eyas.targets.native.forms import activation_of
from eyas.targets.native.latent import PARTS, LatentHeads, latent_heads
from eyas.targets.native.library import Activation
from eyas.targets.native.packed_linears import PackedEmbedding, matrix_of
from eyas.targets.native.recurrent import recurrent_parts
from eyas.targets.transformers_names import rotation

_LOG = logging.getLogger("eyas")

_NAMES = {
    "embed_in": "embed_tokens", "wte": "embed_tokens", "embeddings": "embed_tokens", "wpe": "embed_positions",
    "h": "layers", "final_layer_norm": "norm", "final_layernorm": "norm", "ln_f": "norm", "norm_f": "norm",
    "attention": "self_attn", "attn": "self_attn", "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
    "query_key_value": "qkv_proj", "c_attn": "qkv_proj", "dense": "o_proj",
    "dense_h_to_4h": "up_proj", "c_fc": "up_proj", "fc1": "up_proj", "dense_4h_to_h": "down_proj", "fc2": "down_proj",
    "act": "act_fn", "activation_fn": "act_fn", "activation": "act_fn",
    "linear_attn": "mixer", "mamba": "mixer", "conv": "mixer", "embedding_norm": "norm",
    "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "pre_ff_layernorm": "post_attention_layernorm", "feed_forward": "mlp", "shared_mlp": "mlp",
    "input_linear": "gate_up_proj", "output_linear": "down_proj",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
    "out_proj": "o_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm",
}  # fmt: skip
"""Other families' names of a decoder's parts -> Llama's names."""
_NORMS: tuple[Mapping[str, str], ...] = (
    {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"},  # Llama and most others
    {  # Gemma
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    },
    {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "mlp_out_norm"},  # OLMo
    {"input_layernorm": "input_norm"},  # Phi, whose MLP reads the same input as attention
    {"norm": "input_norm"},  # Nemotron-H, whose layers have one part each
)
"""Sets of norms that layers may have: name -> field of `LayerParts`."""
_OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}
_OF_MLP = {"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"}
"""The linears of attention and MLP: separate, fused where they have one input, or an MLP without a gate."""
_KNOWN_ARGUMENTS = {
    "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "cache", "layer_past", "position_ids",
    "use_cache", "output_attentions", "encoder_hidden_states", "encoder_attention_mask", "kwargs",
}  # fmt: skip
"""Arguments that attention may take. Trials find whether it uses position ids for more than RoPE (`layer_trials`)."""
_SHARED = ("shared_expert", "shared_experts")
"""Names of the expert that all tokens share."""


def transformers_decoder(model: Any) -> NativeDecoder | None:
    """Make a native decoder of a causal LM with native linears; None if its layers are of another kind."""
    try:
        return NativeDecoder(*described_decoder(model))
    except NOT_LIKE_LLAMA as error:
        _LOG.debug("no native passes: %s", error)
        return None


NOT_LIKE_LLAMA = (UnsupportedModelError, AttributeError, TypeError, KeyError)
"""What a model of another kind may raise while it is taken apart."""


def described_decoder(model: Any) -> DecoderDescription:
    """Take a causal LM apart. Raises one of `NOT_LIKE_LLAMA` if its layers are of another kind."""
    base = text_decoder(model)
    config = model.config.get_text_config()
    layers = decoder_layers(model, config.num_hidden_layers)
    plan = attention_plan(config)
    types = plan.of_layers(config)
    attends = [index for index, kind in enumerate(types) if kind not in plan.recurrent]
    if not attends:
        raise UnsupportedModelError("no layer attends")
    shared = _parts(base)
    _check_parts(base, shared, {"embed_tokens", "layers", "norm"}, {"rotary_emb", "embed_positions"})
    ordered = {"rotary_emb", "embed_positions"} & set(shared)
    if len(ordered) != 1 and (ordered or not plan.recurrent):  # recurrent states depend on the order of tokens
        raise UnsupportedModelError(f"{type(base).__name__} has neither RoPE nor learned positions, or both")
    kinds = sorted({types[index] for index in attends})
    heads = config.num_attention_heads
    for index in attends:
        _check_arguments(_parts_of_layer(layers[index])["self_attn"])
    attention: Any = _parts_of_layer(layers[attends[0]])["self_attn"]
    latent = LatentHeads()
    size = int(getattr(attention, "head_dim", getattr(attention, "head_size", 0)))
    groups = heads // getattr(attention, "num_key_value_groups", 1)
    ropes = list[RopeTables]()
    if hasattr(attention, "kv_a_proj_with_mqa"):
        latent, tables = latent_heads(attention, shared["rotary_emb"], model.dtype)
        size = attention.qk_head_dim
        groups = 1
        ropes = [tables]
    elif "rotary_emb" in shared:
        ropes = _rope_tables(shared["rotary_emb"], kinds, torch.empty(0, dtype=model.dtype, device=model.device))
    parts = []
    scales = set()
    parallel = set()
    for layer, kind in zip(layers, types, strict=True):
        rope = kinds.index(kind) if len(ropes) > 1 and kind in kinds else 0
        parts.append(_layer_parts(layer, plan.windows.get(kind), rope if ropes else None))
        alone = parts[-1].input_norm is parts[-1].mlp_norm is not None
        if kind in kinds:
            scales.add(_scale(layer))
        parallel.add(bool(getattr(layer, "use_parallel_residual", alone)))
    activations = {
        activation_of(getattr(each.mlp, "act_fn", nn.functional.silu)) for each in parts if each.mlp is not None
    } or {Activation.SILU}
    if any(len(found) > 1 for found in (scales, parallel, activations)):
        raise UnsupportedModelError("layers differ in activation, scale or the input of their MLPs")
    if getattr(config, "clip_qkv", None):
        raise UnsupportedModelError("queries, keys and values are clipped")
    sizes = Heads(
        heads,
        groups,
        size,
        scales.pop(),
        float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        latent,
        hasattr(attention, "query_key_value"),
        _gated(attention, heads * size),
    )
    positions = shared.get("embed_positions")
    form = DecoderForm(
        limit=context_limit(config),
        activation=activations.pop(),
        embedding_scale=_embedding_scale(base, shared["embed_tokens"]),
        positions=None if positions is None else positions.weight.detach(),
        parallel_residual=parallel.pop(),
    )
    table = matrix_of(shared["embed_tokens"])
    return DecoderDescription(
        parts, shared["norm"], model.get_output_embeddings(), sizes, ropes, table, model.dtype, form
    )


def _gated(attention: Any, queries: int) -> bool:
    """Whether attention's `q_proj` also makes a gate for each of the `queries` features."""
    return getattr(getattr(attention, "q_proj", None), "out_features", 0) == 2 * queries


def _parts(module: nn.Module, c_proj: str = "c_proj") -> dict[str, Any]:
    """A module's children under Llama's names, without those that do nothing.

    `c_proj` is Llama's name for GPT-2's linear `c_proj`, which is the last one both of attention and of an MLP.
    """
    names = {**_NAMES, "c_proj": c_proj}
    found = [
        (names.get(name, name), child)
        for name, child in module.named_children()
        if type(child) not in (nn.Dropout, nn.Identity)
    ]
    if len(dict(found)) < len(found):
        raise UnsupportedModelError(f"{type(module).__name__} has two parts of the same kind")
    return dict(found)


def _check_arguments(attention: nn.Module) -> None:
    odd = set(signature(attention.forward).parameters) - _KNOWN_ARGUMENTS
    if odd:
        raise UnsupportedModelError(f"{type(attention).__name__} takes {', '.join(sorted(odd))}")


def _parts_of_layer(layer: nn.Module) -> dict[str, Any]:
    """A layer's parts under Llama's names, with a recurrent part as `mixer`.

    Models whose layers have one part next to a norm call it `mixer`, whatever it is.
    """
    parts = _parts(layer)
    if set(parts) == {"norm", "mixer"}:
        mixer = parts.pop("mixer")
        name = "self_attn" if hasattr(mixer, "q_proj") else "mixer" if hasattr(mixer, "conv1d") else "mlp"
        parts[name] = mixer
    return parts


def _scale(layer: Any) -> float:
    """The factor of a layer's scores, including the factors of attention's input and of keys (Falcon-H1)."""
    attention = _parts_of_layer(layer)["self_attn"]
    of_input = float(getattr(layer, "attention_in_multiplier", 1.0))
    return float(attention.scaling) * of_input**2 * float(getattr(attention, "key_multiplier", 1.0))


def _factors(layer: Any, mlp: Any) -> LayerFactors:
    """The factors of what a layer adds to the residual; the factor of attention's input also scales its values."""
    every = float(getattr(layer, "residual_multiplier", 1.0))
    recurrent, given, attention = (
        float(getattr(layer, f"{name}_multiplier", 1.0)) for name in ("ssm_out", "attention_in", "attn_out")
    )
    gate, down = (float(getattr(mlp, f"{name}_multiplier", 1.0)) for name in ("gate", "down"))
    return LayerFactors(every * recurrent, every * given * attention, every * down, gate)


def _layer_parts(layer: Any, window: int | None, rope: int | None) -> LayerParts:
    """Take apart a layer that consists only of norms, attention, a recurrence, and an MLP or experts."""
    parts = _parts_of_layer(layer)
    sparse_moe = parts.pop("block_sparse_moe", None)
    of_layer = {"self_attn", "mixer", "mlp"} & set(parts)
    names = next((names for names in _NORMS if set(parts) - of_layer == set(names)), None)
    if names is None or (len(of_layer) == 1) != ("norm" in parts):
        raise UnsupportedModelError(f"{type(layer).__name__} has the parts {sorted(parts)}")
    norms: dict[str, Any] = {"input_norm": None, "mlp_norm": None}
    norms |= {part: parts[name] for name, part in names.items()}
    if len(names) == 1 and "mlp" in of_layer:
        norms["mlp_norm"] = norms["input_norm"]
    if of_layer == {"mlp"}:
        norms["input_norm"] = None
    mlp = _mlp_parts(parts["mlp"]) if "mlp" in parts else {"mlp": None}
    if sparse_moe is not None:
        mlp |= {"routed": _routed(sparse_moe, "router")}
    mlp |= {"factors": _factors(layer, parts.get("mlp"))}
    recurrent = recurrent_parts(parts["mixer"]) if "mixer" in parts else None
    if "self_attn" not in parts:
        return LayerParts(None, **mlp, **norms, recurrent=recurrent)
    attention = parts["self_attn"]
    of_attention = _parts(attention, "o_proj")
    if set(of_attention) not in PARTS:
        _check_linears(attention, of_attention, _OF_ATTENTION, {"q_norm", "k_norm", "rotary_emb"})
    if dict(attention.named_parameters(recurse=False)).keys() - {"sinks"}:
        raise UnsupportedModelError(f"{type(attention).__name__} has parameters of its own")
    return LayerParts(
        attention if set(of_attention) in PARTS else SimpleNamespace(**of_attention),
        **mlp,
        **norms,
        window=window,
        rope=rope,
        sinks=getattr(attention, "sinks", None),
        recurrent=recurrent,
    )


def _mlp_parts(mlp: Any) -> dict[str, Any]:
    """Take apart an MLP, or experts with their router and the shared expert, if there is one."""
    if not isinstance(getattr(mlp, "experts", None), NativeExperts):
        parts = _parts(mlp, "down_proj")
        _check_linears(mlp, parts, _OF_MLP, {"act_fn"})
        return {"mlp": SimpleNamespace(**parts)}
    router = "router" if hasattr(mlp, "router") else "gate"
    _check_parts(mlp, _parts(mlp), {"experts", router}, {*_SHARED, "shared_expert_gate"})
    expert: Any = next((getattr(mlp, name) for name in _SHARED if getattr(mlp, name, None) is not None), None)
    shared = None if expert is None else _parts(expert)
    if shared is not None:
        _check_linears(expert, shared, _OF_MLP, {"act_fn"})
    return {"mlp": None if shared is None else SimpleNamespace(**shared), "routed": _routed(mlp, router)}


def _routed(mlp: Any, router: str) -> RoutedExperts:
    gate = getattr(mlp, router)
    if not isinstance(mlp.experts, NativeExperts) or not isinstance(gate, NativeRouter):
        raise UnsupportedModelError(f"{type(gate).__name__} chooses experts in its own way")
    return RoutedExperts(mlp.experts, gate, getattr(mlp, "shared_expert_gate", None))


def _check_linears(module: nn.Module, parts: Mapping[str, Any], forms: Sequence[set[str]], allowed: set[str]) -> None:
    needed = next((form for form in forms if form <= set(parts)), forms[0])
    _check_parts(module, parts, needed, allowed)


def _check_parts(module: nn.Module, parts: Mapping[str, Any], needed: set[str], allowed: set[str]) -> None:
    found = set(parts)
    if not needed <= found or found - needed - allowed:
        raise UnsupportedModelError(f"{type(module).__name__} has the parts {sorted(found)}")


def _rope_tables(rotary: Any, types: list[str], probe: Tensor) -> list[RopeTables]:
    """One RoPE table for all layers, or one per attention type in `types`."""
    if "layer_type" not in signature(rotary.forward).parameters:
        found: list[RopeTables] = [partial(rotation, rotary, probe)]
    else:
        found = [partial(rotation, rotary, probe, layer_type=kind) for kind in types]
    return [partial(_both_halves, tables) if _one_half(tables, probe.device) else tables for tables in found]


def _one_half(tables: RopeTables, device: torch.device) -> bool:
    """Whether tables only have entries for the first half of a head's rotated features, which the second half shares.

    Raises UnsupportedModelError if the tables aren't cosines and sines.
    """
    made: Any = tables(torch.arange(9, device=device).unsqueeze(0))
    if not isinstance(made, tuple):
        raise UnsupportedModelError("RoPE isn't given by cosines and sines")
    cosines, _ = made
    left, right = cosines.tensor_split(2, dim=-1)
    return left.shape != right.shape or not left.equal(right)


def _both_halves(tables: RopeTables, positions: Tensor) -> tuple[Tensor, Tensor]:
    cosines, sines = tables(positions)
    return torch.cat((cosines, cosines), dim=-1), torch.cat((sines, sines), dim=-1)


def _embedding_scale(base: Any, embedding: Any) -> float:
    """The factor by which a decoder multiplies its embeddings, either in the embedding module or after it."""
    multiplier = float(getattr(base, "embedding_multiplier", 1.0))
    if type(embedding) in (nn.Embedding, PackedEmbedding):
        return multiplier
    scale = getattr(embedding, "embed_scale", None)
    if not isinstance(scale, Tensor) or multiplier != 1.0:
        raise UnsupportedModelError(f"{type(embedding).__name__} isn't a plain embedding")
    return float(scale.to(embedding.weight.dtype))
