"""How llama.cpp names and lays out the weights of architectures that transformers' own GGUF reader doesn't know.

`TensorLayout` does for them what transformers' `TensorProcessor` does for the others: it names each tensor's parameter
and undoes what llama.cpp's converter did to the values. The converter stores Qwen's norms with 1 added, and its heads
of values in another order; it splits DeepSeek's second projection of keys and values, and every stack of experts.

Shapes: K and V heads of keys and values of a linear attention, D their size, R = V / K, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


def _both(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Names of modules and their tensors -> of weights and biases."""
    return {f"{ours}.{part}": (f"{theirs}.{part}",) for ours, theirs in names.items() for part in ("weight", "bias")}


_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight"}  # fmt: skip
_ATTENTION = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
"""The halves of transformers' `gate_up_proj`; llama.cpp also reads both in one tensor."""


def _experts(shared: str) -> dict[str, tuple[str, ...]]:
    """Routed and shared experts; `shared` is transformers' name of the latter."""
    return {
        "mlp.experts.gate_up_proj": (*_GATE_UP, "ffn_gate_up_exps.weight"),
        "mlp.experts.down_proj": ("ffn_down_exps.weight",),
        "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias",),
        **_both({
            "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
            f"mlp.{shared}.gate_proj": "ffn_gate_shexp", f"mlp.{shared}.up_proj": "ffn_up_shexp",
            f"mlp.{shared}.down_proj": "ffn_down_shexp",
        }),
    }  # fmt: skip


_DELTA = {
    "linear_attn.A_log": ("ssm_a",), "linear_attn.dt_bias": ("ssm_dt.bias",),
    **_both({
        "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    }),
}  # fmt: skip
_SPLIT_DELTA = _both({
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
})  # fmt: skip
_QKVZ = ("attn_qkv.weight", "attn_gate.weight")
_KV_B = ("attn_k_b.weight", "attn_v_b.weight")


@dataclass(frozen=True)
class _Family:
    """An architecture's names, and how its values are stored."""

    layer: Mapping[str, tuple[str, ...]]
    """Parameter of a layer -> the tensors that hold it, or parts of it, both without the layer's prefix."""
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    norms_add_one: bool = False
    """Whether the file's norms are 1 more than the modules' weights; those of linear attentions are not."""
    tiled_heads: bool = False
    """Whether heads of values lie as [R, K], not as [K, R] (`_LinearAttentionVReorderBase` in the converter)."""


_FAMILIES: Mapping[str, _Family] = {
    "qwen35": _Family(_both(_ATTENTION | _MLP) | _DELTA | _SPLIT_DELTA, norms_add_one=True, tiled_heads=True),
    "qwen35moe": _Family(
        _both(_ATTENTION) | _experts("shared_expert") | _DELTA | _SPLIT_DELTA, norms_add_one=True, tiled_heads=True
    ),
    "qwen3next": _Family(
        _both(_ATTENTION) | _experts("shared_expert") | _DELTA
        | {
            "linear_attn.in_proj_qkvz.weight": (*_QKVZ, "ssm_in.weight"),
            "linear_attn.in_proj_ba.weight": ("ssm_ba.weight",),
        },
        norms_add_one=True,
    ),
    "glm4moe": _Family(_both(_ATTENTION | _MLP) | _experts("shared_experts")),
    "deepseek2": _Family(
        _both(
            _MLP
            | {
                "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
                "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
                "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
                "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.o_proj": "attn_output",
            }
        )
        | _experts("shared_experts") | {"self_attn.kv_b_proj.weight": (*_KV_B, "attn_kv_b.weight")}
    ),
    "nemotron_h_moe": _Family(
        {
            "mixer.A_log": ("ssm_a",), "mixer.D": ("ssm_d",), "mixer.dt_bias": ("ssm_dt.bias",),
            "mixer.experts.up_proj": ("ffn_up_exps.weight",), "mixer.experts.down_proj": ("ffn_down_exps.weight",),
            "mixer.gate.e_score_correction_bias": ("exp_probs_b.bias",),
            **_both({
                "norm": "attn_norm", "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d", "mixer.norm": "ssm_norm",
                "mixer.out_proj": "ssm_out", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k",
                "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output", "mixer.gate": "ffn_gate_inp",
                "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
                "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
            }),
        },
        top={"model.embeddings.weight": "token_embd.weight", "model.norm_f.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"},
    ),
}  # fmt: skip
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class Placed(NamedTuple):
    """What a tensor of a file became."""

    weights: Array
    name: str | None
    """The tensor's name; None if it is a part of a parameter that is assembled in `parsed_parameters`."""


class TensorLayout:
    """Names and undone layouts of an architecture's tensors, with the interface of transformers' `TensorProcessor`."""

    def __init__(self, family: _Family, config: Mapping[str, Any]) -> None:
        """`config`: the values of the text config of the model."""
        self._family = family
        self._config = config

    def names(self, parameters: Iterable[str]) -> dict[str, str]:
        """Names of a file's tensors -> those of a model's parameters."""
        found: dict[str, str] = {}
        for name in parameters:
            inside = _IN_LAYER.fullmatch(name)
            if inside is not None:
                found |= {f"blk.{inside[1]}.{tensor}": name for tensor in self.tensors(inside[2])}
            elif name in self._family.top:
                found[self._family.top[name]] = name
        return found

    def tensors(self, parameter: str) -> tuple[str, ...]:
        """The tensors that a parameter of a layer may be made of, without the layer's prefix; empty if unknown."""
        return self._family.layer.get(parameter, ())

    def process(
        self,
        weights: Array,
        name: str,
        tensor_key_mapping: Mapping[str, str],
        parsed_parameters: dict[str, dict[str, torch.Tensor]],
    ) -> Placed:
        """Undo the layout of one tensor; parts of a parameter are put into `parsed_parameters["tensors"]`."""
        stem = name.split(".", 2)[-1] if name.startswith("blk.") else name
        whole = parsed_parameters["tensors"]
        parameter = tensor_key_mapping.get(name, "")
        if stem in _GATE_UP and parameter.endswith("gate_up_proj"):
            _put(whole, parameter, weights, _GATE_UP.index(stem), 2, axis=1)
            return Placed(weights, None)
        if stem in _QKVZ and parameter.endswith("in_proj_qkvz.weight"):
            self._put_qkvz(whole, parameter, weights, gate=stem == _QKVZ[1])
            return Placed(weights, None)
        if stem in _KV_B:
            self._put_kv_b(whole, parameter, weights, keys=stem == _KV_B[0])
            return Placed(weights, None)
        if stem.endswith("norm.weight") and stem != "ssm_norm.weight" and self._family.norms_add_one:
            return Placed(weights - 1, name)
        if self._family.tiled_heads and stem.startswith(("attn_qkv", "attn_gate", "ssm_")):
            return self._grouped(weights, stem, name)
        return Placed(self._plain(weights, stem, parameter), name)

    def _plain(self, weights: Array, stem: str, parameter: str) -> Array:
        match stem:
            case "ssm_a":
                return np.log(-weights).reshape(-1)
            case "ssm_d":
                return weights.reshape(-1)
            case "ssm_norm.weight":
                return weights.reshape(-1)
            case "ssm_conv1d.weight":
                return weights[:, None]
            case "ffn_gate_inp_shexp.weight" if parameter.endswith("shared_expert_gate.weight"):
                return weights.reshape(1, -1)
        return weights

    def _grouped(self, weights: Array, stem: str, name: str) -> Placed:
        """Heads of values of a linear attention from [R, K] to [K, R]."""
        keys, values = self._config["linear_num_key_heads"], self._config["linear_num_value_heads"]
        size = self._config["linear_value_head_dim"]
        times = values // keys
        at = 2 * keys * self._config["linear_key_head_dim"] if stem.startswith(("attn_qkv", "ssm_conv1d")) else 0
        if stem == "ssm_out.weight":
            if times == 1:
                return Placed(weights, name)
            if weights.shape[1] != values * size:  # numbers of rows: columns of blocks can't be reordered
                return Placed(weights, None)
            wide = weights.reshape(-1, times, keys, size).swapaxes(1, 2)
            return Placed(wide.reshape(weights.shape), name)
        if stem != "ssm_norm.weight":
            tail = weights[at:]
            part = size if stem.startswith(("attn_", "ssm_conv1d")) else 1
            tail = tail.reshape(times, keys, part, *tail.shape[1:]).swapaxes(0, 1).reshape(tail.shape)
            weights = np.concatenate((weights[:at], tail))
        return Placed(self._plain(weights, stem, ""), name)

    def _put_qkvz(self, whole: dict[str, torch.Tensor], parameter: str, weights: Array, gate: bool) -> None:
        """Rows of queries, keys, values and gates, which transformers has together for each head of keys."""
        keys, values = self._config["linear_num_key_heads"], self._config["linear_num_value_heads"]
        size = self._config["linear_key_head_dim"]
        wide = self._config["linear_value_head_dim"] * (values // keys)
        parts = [wide] if gate else [size, size, wide]
        if weights.shape[0] != keys * sum(parts):
            raise ValueError(f"{parameter}: {weights.shape[0]} rows don't make {keys} heads")
        split = np.split(weights, np.cumsum([keys * part for part in parts])[:-1])
        rows = np.concatenate([each.reshape(keys, -1, weights.shape[1]) for each in split], axis=1)
        shape = (keys, 2 * size + 2 * wide, weights.shape[1])
        out = whole.setdefault(parameter, torch.zeros(shape, dtype=torch.from_numpy(rows).dtype).flatten(0, 1))
        first = 2 * size + wide if gate else 0
        out.view(shape)[:, first : first + rows.shape[1]] = torch.from_numpy(rows)

    def _put_kv_b(self, whole: dict[str, torch.Tensor], parameter: str, weights: Array, keys: bool) -> None:
        """The projections of latents to keys, which the file has transposed, and to values: [heads, out, rank]."""
        heads, rank = self._config["num_attention_heads"], self._config["kv_lora_rank"]
        sizes = (self._config["qk_nope_head_dim"], self._config["v_head_dim"])
        part = weights.swapaxes(1, 2) if keys else weights
        if part.shape[2] != rank:  # numbers of rows: those of keys are columns in the model
            return
        if part.shape != (heads, sizes[not keys], rank):
            raise ValueError(f"{parameter}: a part of {list(weights.shape)} doesn't fit {heads} heads")
        shape = (heads, sum(sizes), rank)
        out = whole.setdefault(parameter, torch.zeros(shape, dtype=torch.from_numpy(part).dtype).flatten(0, 1))
        first = 0 if keys else sizes[0]
        out.view(shape)[:, first : first + part.shape[1]] = torch.from_numpy(np.ascontiguousarray(part))


def _put(whole: dict[str, torch.Tensor], parameter: str, weights: Array, index: int, parts: int, axis: int) -> None:
    """Put one of several equal parts along an axis into a parameter."""
    part = torch.from_numpy(np.array(weights))
    shape = list(part.shape)
    shape[axis] *= parts
    out = whole.setdefault(parameter, torch.zeros(shape, dtype=part.dtype))
    if list(out.shape) != shape:
        raise ValueError(f"{parameter}: parts of different shapes")
    out.narrow(axis, index * part.shape[axis], part.shape[axis]).copy_(part)


def layout_of(architecture: str, config: Mapping[str, Any]) -> TensorLayout | None:
    """The layout of one of llama.cpp's architectures; None if transformers' own reader knows it."""
    family = _FAMILIES.get(architecture)
    return None if family is None else TensorLayout(family, config)
