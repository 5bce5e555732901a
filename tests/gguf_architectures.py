"""Tiny random models of every architecture that eyas takes from GGUF files, with keys and tensors of llama.cpp.

A case gives a model of transformers, whose config is written by hand, and the keys of its file. eyas must read the file
as that model, and so must llama.cpp (`python -m benchmarks.gguf_targets`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as tf
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .gguf_models import add_tokenizer, blocks_of, permuted

VOCAB = 96
HIDDEN = 64
HEADS = 4
CONTEXT = 256
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "bos_token_id": VOCAB - 2, "eos_token_id": VOCAB - 2, "pad_token_id": VOCAB - 1, "tie_word_embeddings": False,
}  # fmt: skip
_KEYS: dict[str, Any] = {
    "vocab_size": VOCAB, "context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": 4,
    "feed_forward_length": 96, "attention.head_count": HEADS, "attention.head_count_kv": 2,
}  # fmt: skip
_RMS, _NORM = {"attention.layer_norm_rms_epsilon": 1e-3}, {"attention.layer_norm_epsilon": 1e-3}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "feed_forward_length": 96}
_DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-6,  # that of the linear attention's own norms, too, in llama.cpp
    "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
_DELTA_KEYS: dict[str, Any] = {
    "attention.key_length": 24, "attention.value_length": 24, "rope.dimension_count": 12, "ssm.conv_kernel": 3,
    "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 48,
    "full_attention_interval": 2, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SIGMOID: dict[str, Any] = {
    "rms_norm_eps": 1e-3, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
_SIGMOID_KEYS = _EXPERTS | {
    "expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True,
}  # fmt: skip
PLAIN: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-3}, _RMS),
    "qwen2": ("Qwen2Config", {"rms_norm_eps": 1e-3}, _RMS),
    "qwen2moe": (
        "Qwen2MoeConfig",
        {
            "rms_norm_eps": 1e-3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        _RMS | _EXPERTS | {"expert_shared_feed_forward_length": 48},
    ),
    "qwen3": (
        "Qwen3Config", {"rms_norm_eps": 1e-3, "head_dim": 24},
        _RMS | {"attention.key_length": 24, "attention.value_length": 24},
    ),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {
            "rms_norm_eps": 1e-3, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "norm_topk_prob": True,
        },
        _RMS | _EXPERTS | {"attention.key_length": 24, "attention.value_length": 24},
    ),
    "phi3": ("Phi3Config", {"rms_norm_eps": 1e-3, "sliding_window": None}, _RMS),
    "gemma2": (
        "Gemma2Config",
        {
            "rms_norm_eps": 1e-3, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6,
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0, "tie_word_embeddings": True,
        },
        _RMS
        | {
            "attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 6,
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "rms_norm_eps": 1e-3, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6,
            "num_hidden_layers": 7, "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 70000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        _RMS
        | {
            "attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 6,
            "block_count": 7, "rope.freq_base": 70000.0,
        },
    ),
    "stablelm": (
        "StableLmConfig", {"layer_norm_eps": 1e-3, "partial_rotary_factor": 0.5},
        _NORM | {"rope.dimension_count": 8, "use_parallel_residual": True},  # as converters write it
    ),
    "starcoder2": ("Starcoder2Config", {"norm_epsilon": 1e-3, "sliding_window": None}, _NORM),
    "nemotron": (
        "NemotronConfig", {"norm_eps": 1e-3, "partial_rotary_factor": 0.5, "head_dim": 16},
        _NORM | {"rope.dimension_count": 8},
    ),
    "falcon": (
        "FalconConfig",
        {"layer_norm_epsilon": 1e-3, "multi_query": True, "num_kv_heads": 1, "ffn_hidden_size": 256, "alibi": False,
         "tie_word_embeddings": True},
        _NORM | {"attention.head_count_kv": 1, "feed_forward_length": 256},
    ),
    "gpt2": (
        "GPT2Config", {"n_positions": CONTEXT, "n_inner": 96, "layer_norm_epsilon": 1e-3},
        _NORM | {"attention.head_count_kv": 4},
    ),
    "mamba": (
        "MambaConfig",
        {"layer_norm_epsilon": 1e-3, "state_size": 8, "intermediate_size": 128, "time_step_rank": 4, "conv_kernel": 3},
        _RMS
        | {
            "ssm.state_size": 8, "ssm.inner_size": 128, "ssm.time_step_rank": 4, "ssm.conv_kernel": 3,
            "feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": None,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "norm_eps": 1e-3, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False, "rope_parameters": {"rope_type": "default", "rope_theta": 70000.0},
        },
        _RMS | {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 4, "rope.freq_base": 70000.0},
    ),
    "qwen35": ("Qwen3_5TextConfig", _DELTA, _DELTA_KEYS | {"rope.dimension_sections": [2, 2, 2, 0]}),
    "qwen35moe": (
        "Qwen3_5MoeTextConfig", _DELTA | _MOE | {"shared_expert_intermediate_size": 48},
        _DELTA_KEYS | _EXPERTS
        | {"expert_shared_feed_forward_length": 48, "rope.dimension_sections": [2, 2, 2, 0],
           "feed_forward_length": None},
    ),
    "qwen3next": (
        "Qwen3NextConfig", _DELTA | _MOE | {"shared_expert_intermediate_size": 48, "norm_topk_prob": True},
        _DELTA_KEYS | _EXPERTS | {"expert_shared_feed_forward_length": 48},
    ),
    "glm4moe": (
        "Glm4MoeConfig",
        _SIGMOID
        | {
            "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        _RMS | _SIGMOID_KEYS
        | {
            "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8,
            "leading_dense_block_count": 1, "expert_group_count": 1, "expert_group_used_count": 1,
        },
    ),
    "deepseek2": (
        "Glm4MoeLiteConfig",
        _SIGMOID
        | {
            "rms_norm_eps": 1e-6,  # that of its latents' norms, whatever the file says; llama.cpp has one for all
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "q_lora_rank": 24, "kv_lora_rank": 32,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4,
        },
        _SIGMOID_KEYS
        | {
            "attention.layer_norm_rms_epsilon": 1e-6, "attention.head_count_kv": 1, "attention.q_lora_rank": 24,
            "attention.kv_lora_rank": 32,
            "attention.key_length": 40, "attention.value_length": 32, "attention.key_length_mla": 24,
            "attention.value_length_mla": 12, "rope.dimension_count": 8, "leading_dense_block_count": 1,
        },
    ),
    "nemotron_h_moe": (
        "NemotronHConfig",
        {
            "layer_norm_epsilon": 1e-5, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
            "n_groups": 2, "conv_kernel": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5,
            "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "moe_latent_size": None,
            "layers_block_type": ["linear_attention", "full_attention", "moe", "moe"],
        },
        _SIGMOID_KEYS
        | {
            "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
            "attention.key_length": 16, "attention.value_length": 16, "attention.head_count_kv": [0, 2, 0, 0],
            "feed_forward_length": [0, 0, 32, 32], "expert_shared_feed_forward_length": 48, "ssm.conv_kernel": 4,
            "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
            "expert_gating_func": None,
        },
    ),
}  # fmt: skip
"""Architecture of llama.cpp -> class of transformers' config, its settings, and the file's keys."""


@dataclass(frozen=True)
class Case:
    """A file, and the model that it must be read as."""

    architecture: str
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys without the architecture's name; None leaves one out."""
    tensors: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.architecture}-{self.name}"


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | values}


def llama3_factors(base: float, size: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """The divisors [D / 2] of RoPE's frequencies that llama.cpp's converter writes for Llama 3."""
    found = []
    for index in range(size // 2):
        wave = 2 * math.pi * base ** (2 * index / size)
        kept = min(1.0, max(0.0, (original / wave - low) / (high - low)))
        found.append(1 / ((1 - kept) / factor + kept))
    return np.array(found, np.float32)


_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
_YARN_ROPE = {"factor": 4.0, "original_max_position_embeddings": 32}
_LISTED = np.linspace(1.0, 3.0, 8, dtype=np.float32)
_PART = ("stablelm", "nemotron", "qwen35", "qwen35moe", "qwen3next", "glm4moe")
"""Architectures whose heads are rotated in part, here by half."""
_WITH_ROPE = [name for name in PLAIN if name not in ("gpt2", "mamba", "nemotron_h_moe")]


def _yarn_divisors() -> np.ndarray:
    """By what transformers' yarn divides the frequencies of `_YARN`."""
    llama = tf.LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, **_rope("yarn", **_YARN_ROPE))
    scaled, _ = ROPE_INIT_FUNCTIONS["yarn"](llama)
    plain = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    return (plain / scaled).numpy()


def _nested(name: str, part: Mapping[str, float], parameters: dict[str, Any]) -> dict[str, Any]:
    """RoPE's parameters in the config of an architecture; Phi-3's takes only lists of factors."""
    full = parameters["rope_parameters"] | part
    if name == "phi3" and full["rope_type"] != "default":
        divisors, factor = ([8.0] * 8, 1.0) if full["rope_type"] == "linear" else (_yarn_divisors().tolist(), 1.1386294)
        full = {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": divisors, "long_factor": divisors,
            "attention_factor": factor, "factor": 1.0,
        }  # fmt: skip
        return {"rope_parameters": full, "original_max_position_embeddings": CONTEXT}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": plain} if name == "gemma3" else full}


def _of_every_rope() -> list[Case]:
    """Cases of each architecture with RoPE: another base, and scalings by keys."""
    cases = []
    for name in _WITH_ROPE:
        part = {"partial_rotary_factor": 0.5} if name in _PART else {}
        for case, rope, keys in (
            ("base", _rope("default", rope_theta=999999.0), {"rope.freq_base": 999999.0}),
            ("linear", _rope("linear", factor=8.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
            ("old-linear", _rope("linear", factor=8.0), {"rope.scale_linear": 8.0}),
            ("yarn", _rope("yarn", **_YARN_ROPE), _YARN),
            ("none", _rope("default"), {"rope.scaling.type": "none", "rope.scaling.factor": 8.0}),
        ):
            if (name, case) == ("gemma2", "none"):
                continue  # refused: llama.cpp scales some layers
            if name == "deepseek2" and case != "base":
                continue  # refused: llama.cpp scales scores, too
            if name in ("qwen35moe", "qwen3next") and case != "base":
                continue  # as in qwen35
            config = _nested(name, part, rope)
            cases.append(Case(name, case, config, {"rope.freq_base": None} | keys))
    return cases


CASES: tuple[Case, ...] = (
    *(Case(name, "plain") for name in PLAIN),
    *_of_every_rope(),
    Case(
        "llama", "yarn-attn-factor", _rope("yarn", **_YARN_ROPE, attention_factor=1.5 * (1 + 0.1 * math.log(4.0))),
        _YARN | {"rope.scaling.attn_factor": 1.5, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.finetuned": True},
    ),
    Case(
        "llama", "llama3",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        tensors={"rope_freqs.weight": llama3_factors(1e4, 16, 8.0, 1.0, 4.0, 64)},
    ),
    Case(
        "llama", "listed",
        _rope(
            "longrope", short_factor=_LISTED.tolist(), long_factor=_LISTED.tolist(), attention_factor=1.0, factor=1.0,
            original_max_position_embeddings=CONTEXT,
        ),
        tensors={"rope_freqs.weight": _LISTED},
    ),
    Case(
        "llama", "listed-and-linear",
        _rope(
            "longrope", short_factor=(_LISTED * 2).tolist(), long_factor=(_LISTED * 2).tolist(), attention_factor=1.0,
            factor=1.0, original_max_position_embeddings=CONTEXT,
        ),
        {"rope.scaling.factor": 2.0}, {"rope_freqs.weight": _LISTED},
    ),
    *(
        Case(
            name, "longrope",
            {
                **_rope(
                    "longrope", short_factor=_LISTED.tolist(), long_factor=(_LISTED * 2).tolist(),
                    attention_factor=1.2, factor=2.0, original_max_position_embeddings=CONTEXT,
                ),
                "max_position_embeddings": 2 * CONTEXT,
                **({"original_max_position_embeddings": CONTEXT} if name == "phi3" else {}),
            },
            {
                "context_length": 2 * CONTEXT,
                "rope.scaling.original_context_length": CONTEXT, "rope.scaling.attn_factor": 1.2,
                **({"rope.scaling.type": "longrope"} if name == "llama" else {}),
            },
            {"rope_factors_short.weight": _LISTED, "rope_factors_long.weight": _LISTED * 2},
        )
        for name in ("llama", "phi3")
    ),
    Case("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
    Case("llama", "tied", {"tie_word_embeddings": True}),
    Case(
        "llama", "wide-heads", {"head_dim": 32},
        {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32},
    ),
    Case("llama", "one-head", {"num_key_value_heads": 4}, {"attention.head_count_kv": None}),
    Case("llama", "lists", {}, {"feed_forward_length": [96] * 4, "attention.head_count": [4] * 4}),
    Case("llama", "yarn-and-factors", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1 + 0.1 * math.log(4.0), "factor": 1.0,
        "original_max_position_embeddings": CONTEXT, **dict.fromkeys(
            ("short_factor", "long_factor"), (_yarn_divisors() * _LISTED).tolist()
        )}}, _YARN, {"rope_freqs.weight": _LISTED}),
    Case("llama", "factor-of-attention", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1.3, "factor": 1.0,
        "original_max_position_embeddings": CONTEXT, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
    }}, {"rope.scaling.attn_factor": 1.3}),
    Case("llama", "covering-window", {}, {"attention.sliding_window": CONTEXT}),
    Case(
        "qwen2moe", "default-sizes", {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 96},
        {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None},
    ),
    Case("phi3", "partial", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 8}),
    Case("phi3", "covering-window", {"sliding_window": 255}, {"attention.sliding_window": 255}),
    Case(
        "gemma2", "defaults",
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention.sliding_window": None},
    ),
    Case(
        "gemma2", "pattern", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
                              "num_hidden_layers": 6},
        {"attention.sliding_window_pattern": [False, True, True] * 2, "block_count": 6},
    ),
    Case("gemma2", "27b", {"num_hidden_layers": 46, "head_dim": 8}, {
        "block_count": 46, "attention.key_length": 8, "attention.value_length": 8}),
    Case("gemma3", "cap", {"final_logit_softcapping": 4.0}, {"final_logit_softcapping": 4.0}),
    Case(
        "gemma3", "bases",
        {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 70000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        }},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 500.0},
    ),
    Case(
        "gemma3", "period", {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]},
        {"attention.sliding_window_pattern": 2},
    ),
    Case("gemma3", "no-window", {"layer_types": ["full_attention"] * 7}, {"attention.sliding_window": 0}),
    Case("stablelm", "parallel", {"use_parallel_residual": True}),
    Case("stablelm", "biases", {"use_qkv_bias": True}),
    Case("starcoder2", "tied", {"tie_word_embeddings": True}),
    Case("nemotron", "biases", {"attention_bias": True, "mlp_bias": True}),
    Case("mamba", "tied", {"tie_word_embeddings": True}),
)  # fmt: skip


_SCALE = 4.0
"""Larger weights would amplify float32's rounding, and that of llama.cpp's GELU, which is a table in half precision."""


def build(case: Case) -> Any:
    """The model of a case, random, in float32."""
    name, config, _ = PLAIN[case.architecture]
    torch.manual_seed(sum(map(ord, str(case))))
    values = _SIZES | config | dict(case.config)
    model = tf.AutoModelForCausalLM.from_config(getattr(tf, name)(**values)).float().eval().requires_grad_(False)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer), alpha=0.1)
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):
            continue
        if parameter.dim() > 1:
            parameter.mul_(_SCALE)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def write(
    path: Path,
    case: Case,
    model: Any,
    *,
    heads: Mapping[str, np.ndarray] | None = None,
    companion: bool = False,
    kind: str = "F32",
    **more: Any,
) -> None:
    """Write a case's model to a GGUF file in float32; `more`: further keys, `.` written as `__`.

    `heads`: tensors of MTP heads, under llama.cpp's names; a `companion` has nothing but them and what they share.
    `kind`: the GGML type of matrices in layers.
    """
    name = case.architecture
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    keys = _KEYS | PLAIN[name][2] | dict(case.keys) | {key.replace("__", "."): value for key, value in more.items()}
    for key, value in keys.items():
        if value is not None:
            _add(writer, key if key.startswith(("general.", "split.")) else f"{name}.{key}", value)
    add_tokenizer(writer, VOCAB, "default")
    own = tensors(name, model) | dict(case.tensors)
    if companion:
        own = {tensor: values for tensor, values in own.items() if not tensor.startswith("blk.")}
    for tensor, values in (own | dict(heads or {})).items():
        array = np.ascontiguousarray(values, dtype=np.float32)
        plain = array.ndim == 1 or not tensor.startswith("blk.") or "ssm_" in tensor or "_inp" in tensor
        type_ = gguf.GGMLQuantizationType["F32" if plain or array.shape[-1] % 32 else kind]
        writer.add_tensor(tensor, blocks_of(array, type_.name), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def tensors(name: str, model: Any) -> dict[str, np.ndarray]:
    """A model's weights under llama.cpp's names, laid out as its converter does."""
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return renamed(name, model.config, state)


def renamed(name: str, config: Any, state: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Weights under llama.cpp's names, laid out as its converter does."""
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers + 4)
    found = {}
    for key, weight in state.items():
        for part, value in _laid_out(name, config, key, weight):
            if part.startswith(("blk.", "token_embd.", "output")):
                found[part] = value.numpy()
                continue
            stem, _, suffix = part.rpartition(".")
            plain = suffix not in ("weight", "bias")
            found_name = names.get_name(part if plain else stem)
            assert found_name is not None, f"{name}: {part} has no name in GGUF"
            bare = plain and not found_name.endswith("_exps")
            end = "" if bare else ".weight" if plain else f".{suffix}"
            found[f"{found_name}{end}"] = value.numpy()
    return found


_NEXTN = {
    "mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm", "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm",
    "shared_head.norm": "shared_head_norm", "shared_head.head": "shared_head_head", "embed_tokens": "embed_tokens",
}  # fmt: skip


def head_tensors(name: str, config: Any, held: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """MTP modules of a safetensors file as heads of a GGUF file: llama.cpp's names and layout."""
    layers = config.num_hidden_layers
    stacked = {}
    found = {}
    if name == "nemotron_h_moe":  # both layers of a module are one block
        head = f"blk.{layers}."
        outer = {
            "0.enorm": "enorm",
            "0.hnorm": "hnorm",
            "0.eh_proj": "eh_proj",
            "1.final_layernorm": "shared_head_norm",
        }
        for key, weight in held.items():
            part = key.removeprefix("mtp.layers.")
            layer, _, rest = part.partition(".")
            if (known := outer.get(part.removesuffix(".weight"))) is not None:
                found[f"{head}nextn.{known}.weight"] = weight.numpy()
            elif (expert := re.fullmatch(r"(mixer\.experts)\.\d+\.(\w+)\.weight", rest)) is not None:
                stacked.setdefault(f"{expert[1]}.{expert[2]}", []).append(weight)
            elif part == "1.norm.weight":
                found[f"{head}post_attention_norm.weight"] = weight.numpy()
            else:
                found[_of_nemotron(f"model.layers.{layers}.{rest}")] = weight.numpy()
        for rest, weights in stacked.items():
            found[_of_nemotron(f"model.layers.{layers}.{rest}")] = torch.stack(weights).numpy()
        return found
    for key, weight in held.items():
        inside = re.sub(r"^mtp\.layers\.(\d+)", lambda each: f"model.layers.{layers + int(each[1])}", key)
        layer, _, rest = inside.removeprefix("model.layers.").partition(".")
        if (outer := _NEXTN.get((rest if layer.isdecimal() else key).removesuffix(".weight"))) is not None:
            number = int(layer) if layer.isdecimal() else layers
            plus = 1 if key.startswith("mtp.") and "norm" in key else 0
            found[f"blk.{number}.nextn.{outer}.weight"] = (weight + plus).numpy()
        elif (expert := re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)\.weight", inside)) is not None:
            stacked.setdefault(f"{expert[1]}.{expert[3]}", []).append(weight)
        else:
            found |= renamed(name, config, {inside: weight})
    for key, weights in stacked.items():
        found |= renamed(name, config, {key: torch.stack(weights)})
    return found


def _laid_out(name: str, config: Any, key: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors of a file that a weight becomes."""
    if name == "llama" and (".q_proj." in key or ".k_proj." in key):
        heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
        return [(key, permuted(weight.reshape(len(weight), -1), heads).reshape(weight.shape))]
    if name in ("gemma2", "gemma3", "nemotron") and key.endswith("norm.weight"):
        return [(key, weight + 1)]
    if name == "nemotron" and "layernorm.weight" in key:
        return [(key, weight + 1)]
    if name == "nemotron_h_moe":
        return [(_of_nemotron(key), *_as_nemotron(config, key, weight))]
    if name in ("qwen35", "qwen35moe", "qwen3next"):
        return _of_qwen(name, config, key, weight)
    if key.endswith("e_score_correction_bias"):
        return [(key.replace("correction_bias", "correction.bias"), weight)]
    if key.endswith("kv_b_proj.weight"):
        both = weight.view(config.num_attention_heads, -1, weight.shape[1])
        keys, values = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return [(key.replace("kv_b", "k_b"), keys.transpose(1, 2)), (key.replace("kv_b", "v_b"), values)]
    if name == "gpt2" and weight.dim() == 2 and "c_" in key:
        return [(key, weight.T)]
    if key.endswith("A_log"):
        return [(key, -weight.exp())]
    if weight.dim() == 3 and weight.shape[1] == 1:
        return [(key, weight[:, 0])]
    return _of_experts(key, weight)


_NEMOTRON = {
    "norm.weight": "attn_norm.weight", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d", "mixer.dt_bias": "ssm_dt.bias",
    "mixer.in_proj": "ssm_in", "mixer.out_proj": "ssm_out", "mixer.conv1d": "ssm_conv1d", "mixer.norm": "ssm_norm",
    "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
    "mixer.experts.up_proj": "ffn_up_exps.weight", "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.gate": "ffn_gate_inp", "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
_NEMOTRON_TOP = {
    "model.embeddings.weight": "token_embd", "model.norm_f.weight": "output_norm", "lm_head.weight": "output"
}  # fmt: skip


def _of_nemotron(key: str) -> str:
    """A name in the file; tensors outside of layers have no prefix."""
    if key in _NEMOTRON_TOP:
        return f"{_NEMOTRON_TOP[key]}.weight"
    _, _, layer, rest = key.split(".", 3)
    if rest in _NEMOTRON:
        return f"blk.{layer}.{_NEMOTRON[rest]}"
    stem, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{_NEMOTRON[stem]}.{suffix}"


def _as_nemotron(config: Any, key: str, weight: Tensor) -> list[Tensor]:
    """As `NemotronHModel` in llama.cpp's converter."""
    if key.endswith("A_log"):
        return [-weight.exp()[:, None]]
    if key.endswith(".D"):
        return [weight[:, None]]
    if key.endswith("mixer.norm.weight"):
        return [weight.view(config.n_groups, -1)]
    return [weight[:, 0] if key.endswith("conv1d.weight") else weight]


def _of_experts(key: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    if key.endswith("experts.gate_up_proj"):
        gate, up = weight.chunk(2, dim=1)
        return [(key.replace("gate_up", "gate"), gate), (key.replace("gate_up", "up"), up)]
    if key.endswith("shared_expert_gate.weight"):
        return [(key, weight[0])]
    return [(key, weight)]


def _of_qwen(name: str, config: Any, key: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """As `Qwen3NextModel` in llama.cpp's converter, for Qwen3.5 with heads of values in tiles."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, wide = config.linear_key_head_dim, config.linear_value_head_dim
    stem = f"blk.{key.split('.')[2]}." if key.startswith("model.layers.") else ""

    def tiled(part: Tensor, head: int) -> Tensor:
        """Rows of heads, those of one head of keys no longer together."""
        if name == "qwen3next":
            return part
        return torch.cat(
            [part[(k * values // keys + v) * head :][:head] for v in range(values // keys) for k in range(keys)]
        )

    first = 2 * keys * size
    match key.split("linear_attn.")[-1]:
        case "A_log":
            return [(f"{stem}ssm_a", tiled(-weight.exp(), 1))]
        case "dt_bias":
            return [(f"{stem}ssm_dt.bias", tiled(weight, 1))]
        case "conv1d.weight":
            rows = weight[:, 0]
            return [(f"{stem}ssm_conv1d.weight", torch.cat((rows[:first], tiled(rows[first:], wide))))]
        case "in_proj_qkv.weight":
            return [(key, torch.cat((weight[:first], tiled(weight[first:], wide))))]
        case "in_proj_z.weight":
            return [(key, tiled(weight, wide))]
        case "in_proj_a.weight" | "in_proj_b.weight":
            return [(key, tiled(weight, 1))]
        case "out_proj.weight":
            return [(key, tiled(weight.T, wide).T)]
        case "in_proj_qkvz.weight":
            per = [size, size, wide * values // keys, wide * values // keys]
            parts = weight.view(keys, sum(per), -1).split(per, dim=1)
            q, k, v, z = (part.flatten(0, 1) for part in parts)
            return [(f"{stem}attn_qkv.weight", torch.cat((q, k, v))), (f"{stem}attn_gate.weight", z)]
    if key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        return [(key, weight + 1)]
    return _of_experts(key, weight)
