"""The keys of GGUF files that llama.cpp reads for the architectures that eyas takes, and what eyas does about each.

llama.cpp computes a model from the keys of its own architecture alone; keys under other names are notes by the file's
author. A key of the architecture that is in no table, or has a value that eyas doesn't compute with, refuses the
file by name: it would run as another model. `benchmarks/gguf_targets.py` compares the tables with llama.cpp's sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from eyas.errors import ModelError
from eyas.gguf import Gguf, SkippedArray


@dataclass(frozen=True)
class ToConfig:
    """The value becomes an attribute of transformers' config."""

    attribute: str


@dataclass(frozen=True)
class Consumed:
    """The value is read by `eyas.gguf_config`."""

    what: str


@dataclass(frozen=True)
class MustBe:
    """The value must be one of these, which is what the model computes anyway."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class NoEffect:
    """The value changes nothing that is computed."""

    why: str


Treatment: TypeAlias = ToConfig | Consumed | MustBe | NoEffect
_REFUSED = "running it anyway would be another model; use the model's own folder, or another file of it"

_SIZES: dict[str, Treatment] = {
    "vocab_size": Consumed("must be the embedding's rows"),
    "context_length": ToConfig("max_position_embeddings"),
    "block_count": ToConfig("num_hidden_layers"),
    "embedding_length": ToConfig("hidden_size"),
    "feed_forward_length": ToConfig("intermediate_size"),
    "embedding_length_out": Consumed("must be embedding_length"),
    "tensor_data_layout": NoEffect("how Meta's own weights were permuted; the tensors are in llama.cpp's order"),
    "attention.causal": MustBe((True,), "eyas decodes from left to right"),
    "pooling_type": MustBe((0,), "eyas pools no embeddings"),
    "nextn_predict_layers": MustBe((0,), "eyas knows no MTP heads in this architecture"),
}  # fmt: skip
_DENSE: dict[str, Treatment] = {
    "expert_count": MustBe((0,), "this architecture's experts are read from its own folder only"),
    "expert_used_count": MustBe((0,), "this architecture's experts are read from its own folder only"),
    "expert_feed_forward_length": MustBe((0,), "this architecture's experts are read from its own folder only"),
    "expert_shared_feed_forward_length": MustBe((0,), "this architecture's experts are read from its own folder only"),
}
_NO_SHARED: dict[str, Treatment] = {
    "expert_shared_count": MustBe((0,), "no expert is shared in this architecture"),
    "expert_shared_feed_forward_length": MustBe((0,), "no expert is shared in this architecture"),
    "leading_dense_block_count": MustBe((0,), "the first layers aren't different in this architecture"),
}
_NO_GROUPS: dict[str, Treatment] = {
    "expert_group_count": MustBe((0, 1), "experts aren't grouped in this architecture"),
    "expert_group_used_count": MustBe((0, 1), "experts aren't grouped in this architecture"),
}
_HEADS: dict[str, Treatment] = {
    "attention.head_count": ToConfig("num_attention_heads"),
    "attention.head_count_kv": ToConfig("num_key_value_heads"),
    "attention.key_length": Consumed("the size of a head"),
    "attention.value_length": Consumed("must be key_length"),
    "attention.key_length_swa": Consumed("must be key_length"),
    "attention.value_length_swa": Consumed("must be key_length"),
}
_RMS: dict[str, Treatment] = {
    "attention.layer_norm_rms_epsilon": ToConfig("rms_norm_eps"),
    "attention.layer_norm_epsilon": NoEffect("all norms are RMS norms"),
}
_ROPE: dict[str, Treatment] = {
    "rope.dimension_count": Consumed("the rotated part of a head"),
    "rope.dimension_count_swa": Consumed("must be rope.dimension_count"),
    "rope.freq_base": Consumed("RoPE"),
    "rope.scaling.type": Consumed("RoPE"),
    "rope.scaling.factor": Consumed("RoPE"),
    "rope.scale_linear": Consumed("RoPE: the old name of rope.scaling.factor"),
    "rope.scaling.attn_factor": Consumed("RoPE"),
    "rope.scaling.original_context_length": Consumed("RoPE: yarn, and the limit of longrope's short factors"),
    "rope.scaling.finetuned": NoEffect("how the model was trained"),
    "rope.scaling.alpha": MustBe((0,), "llama.cpp uses it in another architecture only"),
    "rope.scaling.yarn_ext_factor": MustBe((1,), "llama.cpp uses it in other architectures only"),
    "rope.scaling.yarn_beta_fast": MustBe((32,), "llama.cpp uses it in other architectures only"),
    "rope.scaling.yarn_beta_slow": MustBe((1,), "llama.cpp uses it in other architectures only"),
    "rope.scaling.yarn_log_multiplier": MustBe((0,), "llama.cpp uses it in other architectures only"),
    "rope.scaling.yarn_attn_factor": Consumed("must be the factor that llama.cpp computes from rope.scaling.factor"),
    "rope.dimension_sections": MustBe(([0, 0, 0, 0],), "positions here are plain numbers"),
}  # fmt: skip
_NO_ROPE: dict[str, Treatment] = {key: NoEffect("this architecture has no RoPE") for key in _ROPE}
_HEADS_OF_MTP: dict[str, Treatment] = {
    "block_count": Consumed("layers, those of MTP heads included"),
    "nextn_predict_layers": Consumed("how many of the last layers are MTP heads, which draft"),
}
_SCORED: dict[str, Treatment] = {
    "expert_count": ToConfig("n_routed_experts"),
    "expert_used_count": ToConfig("num_experts_per_tok"),
    "expert_feed_forward_length": ToConfig("moe_intermediate_size"),
    "expert_shared_count": ToConfig("n_shared_experts"),
    "expert_gating_func": MustBe((2,), "sigmoids choose this architecture's experts"),
    "expert_weights_scale": Consumed("what the experts' sum is multiplied by"),
    "expert_weights_norm": Consumed("whether the chosen experts' weights are normalized"),
}
_DELTA: dict[str, Treatment] = {
    "ssm.conv_kernel": ToConfig("linear_conv_kernel_dim"),
    "ssm.state_size": ToConfig("linear_key_head_dim"),
    "ssm.group_count": ToConfig("linear_num_key_heads"),
    "ssm.time_step_rank": ToConfig("linear_num_value_heads"),
    "ssm.inner_size": Consumed("must be state_size times time_step_rank"),
    "full_attention_interval": Consumed("which layers attend"),
    "attention.recurrent_layers": Consumed("which layers attend"),
}
_QWEN_EXPERTS: dict[str, Treatment] = {
    "expert_shared_feed_forward_length": ToConfig("shared_expert_intermediate_size"),
    "expert_shared_count": MustBe((0, 1), "this architecture has one shared expert"),
    "expert_weights_norm": MustBe((True,), "llama.cpp normalizes the weights of this architecture"),
    "leading_dense_block_count": MustBe((0,), "the first layers aren't different in this architecture"),
}
_ANY_SECTIONS: dict[str, Treatment] = {
    "rope.dimension_sections": NoEffect("all sections have the same positions in text"),
}
_NO_SCALING: dict[str, Treatment] = {
    "rope.scaling.type": MustBe(("none", "linear"), "scaled RoPE is read from this architecture's own folder only"),
    "rope.scaling.factor": MustBe((0, 1), "scaled RoPE is read from this architecture's own folder only"),
    "rope.scale_linear": MustBe((0, 1), "scaled RoPE is read from this architecture's own folder only"),
}
_NO_WINDOW: dict[str, Treatment] = {
    "attention.sliding_window": Consumed("llama.cpp has no window here: must be 0 or cover the context"),
}
_EXPERTS: dict[str, Treatment] = {
    "expert_count": ToConfig("num_experts"),
    "expert_used_count": ToConfig("num_experts_per_tok"),
    "expert_feed_forward_length": ToConfig("moe_intermediate_size"),
    "expert_gating_func": MustBe((1,), "a softmax chooses this architecture's experts"),
    "expert_weights_scale": MustBe((0, 1), "llama.cpp doesn't scale this architecture's experts"),
}
_WINDOW: dict[str, Treatment] = {
    "attention.sliding_window": ToConfig("sliding_window"),
    "attention.sliding_window_pattern": Consumed("which layers have a window"),
}
_RMS_MODEL = _SIZES | _NO_GROUPS | _HEADS | _RMS | _ROPE


def _norms(attribute: str) -> dict[str, Treatment]:
    return {
        "attention.layer_norm_epsilon": ToConfig(attribute),
        "attention.layer_norm_rms_epsilon": NoEffect("all norms are layer norms"),
    }


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp: what its keys mean, and what transformers' config says about it."""

    model_type: str
    """transformers' name."""
    keys: Mapping[str, Treatment]
    """Keys, without the architecture's name, and what is done about them."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the config that no key gives."""
    present: Mapping[str, str] = field(default_factory=dict)
    """Attributes that are true if a tensor whose name ends like this exists."""
    sized_heads: bool = False
    """Whether the size of a head may differ from the width divided by the number of heads."""
    rotary: str = "whole"
    """Whether RoPE turns the `whole` head, a `part` of it, or `none`."""
    factors: bool = False
    """Whether llama.cpp reads tensors of RoPE's factors."""


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama", _RMS_MODEL | _DENSE | _NO_WINDOW,
        fixed={"hidden_act": "silu"}, present={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"},
        sized_heads=True, factors=True,
    ),
    "qwen2": Architecture(
        "qwen2", _RMS_MODEL | _DENSE | _NO_WINDOW, fixed={"hidden_act": "silu", "use_sliding_window": False}
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _RMS_MODEL | _NO_WINDOW | _EXPERTS
        | {
            "expert_shared_feed_forward_length": ToConfig("shared_expert_intermediate_size"),
            "expert_weights_norm": MustBe((False,), "llama.cpp doesn't normalize the weights of this architecture"),
        },
        fixed={
            "hidden_act": "silu", "use_sliding_window": False, "norm_topk_prob": False, "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        present={"qkv_bias": "attn_q.bias"},
    ),
    "qwen3": Architecture(
        "qwen3", _RMS_MODEL | _DENSE | _NO_WINDOW, fixed={"hidden_act": "silu", "use_sliding_window": False},
        sized_heads=True,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _RMS_MODEL | _NO_WINDOW | _EXPERTS | _NO_SHARED
        | {"expert_weights_norm": MustBe((True,), "llama.cpp normalizes the weights of this architecture")},
        fixed={
            "hidden_act": "silu", "use_sliding_window": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        sized_heads=True,
    ),
    "phi3": Architecture(
        "phi3",
        _RMS_MODEL | _DENSE
        | {"attention.sliding_window": ToConfig("sliding_window")},  # llama.cpp warns that it leaves the window out
        fixed={"hidden_act": "silu"}, rotary="part", factors=True,
    ),
    "gemma2": Architecture(
        "gemma2",
        _RMS_MODEL | _DENSE | _WINDOW
        | {
            "attn_logit_softcapping": ToConfig("attn_logit_softcapping"),
            "final_logit_softcapping": ToConfig("final_logit_softcapping"),
            "rope.freq_base_swa": Consumed("must be rope.freq_base"),
        },
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}, sized_heads=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _RMS_MODEL | _DENSE | _WINDOW
        | {
            "final_logit_softcapping": ToConfig("final_logit_softcapping"),
            "attn_logit_softcapping": MustBe((0,), "llama.cpp caps no attention scores in this architecture"),
            "rope.freq_base_swa": Consumed("RoPE of the layers with a window"),
            "dense_2_feat_in": NoEffect("for embeddings, whose tensors are refused"),
            "dense_2_feat_out": NoEffect("for embeddings, whose tensors are refused"),
            "dense_3_feat_in": NoEffect("for embeddings, whose tensors are refused"),
            "dense_3_feat_out": NoEffect("for embeddings, whose tensors are refused"),
        },
        fixed={
            "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        sized_heads=True,
    ),
    "stablelm": Architecture(
        "stablelm",
        _SIZES | _NO_GROUPS | _HEADS | _norms("layer_norm_eps") | _ROPE | _DENSE | _NO_WINDOW
        | {"use_parallel_residual": NoEffect("the tensors say it, whatever this says")},
        fixed={"hidden_act": "silu", "qk_layernorm": False}, present={"use_qkv_bias": "attn_q.bias"}, rotary="part",
    ),
    "starcoder2": Architecture(
        "starcoder2", _SIZES | _NO_GROUPS | _HEADS | _norms("norm_epsilon") | _ROPE | _DENSE | _NO_WINDOW,
        fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None}, present={"use_bias": "attn_output.bias"},
    ),
    "nemotron": Architecture(
        "nemotron", _SIZES | _NO_GROUPS | _HEADS | _norms("norm_eps") | _ROPE | _DENSE | _NO_WINDOW,
        fixed={"hidden_act": "relu2"}, present={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
        sized_heads=True, rotary="part",
    ),
    "falcon": Architecture(
        "falcon",
        _SIZES | _NO_GROUPS | _HEADS | _norms("layer_norm_epsilon") | _ROPE | _DENSE | _NO_WINDOW
        | {
            "feed_forward_length": ToConfig("ffn_hidden_size"),
            "attention.head_count_kv": MustBe((1,), "only the first Falcon's one head of keys and values is read"),
        },
        fixed={
            "activation": "gelu", "alibi": False, "new_decoder_architecture": False, "multi_query": True,
            "parallel_attn": True, "bias": False, "num_kv_heads": 1,
        },
    ),
    "gpt2": Architecture(
        "gpt2",
        _SIZES | _NO_GROUPS | _HEADS | _NO_ROPE | _norms("layer_norm_epsilon") | _DENSE
        | {
            "context_length": ToConfig("n_positions"),
            "block_count": ToConfig("n_layer"),
            "embedding_length": ToConfig("n_embd"),
            "feed_forward_length": ToConfig("n_inner"),
            "attention.head_count": ToConfig("n_head"),
            "attention.head_count_kv": Consumed("must be head_count"),
        },
        fixed={"activation_function": "gelu_new"}, rotary="none",
    ),
    "mamba": Architecture(
        "mamba",
        _SIZES | _NO_GROUPS | _DENSE | _NO_ROPE
        | {key: NoEffect("this architecture has no attention") for key in _HEADS}
        | {
            "attention.layer_norm_rms_epsilon": ToConfig("layer_norm_epsilon"),
            "context_length": NoEffect("a recurrent state has no longest context"),
            "feed_forward_length": MustBe((0,), "this architecture has no feed-forward layers"),
            "attention.head_count": MustBe((0,), "this architecture has no attention"),
            "attention.head_count_kv": MustBe((0,), "this architecture has no attention"),
            "ssm.conv_kernel": ToConfig("conv_kernel"),
            "ssm.inner_size": ToConfig("intermediate_size"),
            "ssm.state_size": ToConfig("state_size"),
            "ssm.time_step_rank": ToConfig("time_step_rank"),
            "ssm.dt_b_c_rms": MustBe((False,), "FalconMamba's norms are read from its own folder only"),
            "ssm.group_count": MustBe((0, 1), "states aren't grouped in this architecture"),
        },
        fixed={"hidden_act": "silu", "use_bias": False, "use_conv_bias": True}, rotary="none",
    ),
    "lfm2": Architecture(
        "lfm2",
        _RMS_MODEL | _DENSE | _NO_WINDOW
        | {
            "attention.layer_norm_rms_epsilon": ToConfig("norm_eps"),
            "attention.head_count_kv": Consumed("which layers attend, and their heads"),
            "shortconv.l_cache": ToConfig("conv_L_cache"),
            "leading_dense_block_count": NoEffect("all layers are dense"),
        },
        fixed={"conv_bias": False, "block_auto_adjust_ff_dim": False},
    ),
    "qwen35": Architecture(
        "qwen3_5_text", _RMS_MODEL | _DENSE | _NO_WINDOW | _DELTA | _ANY_SECTIONS | _HEADS_OF_MTP,
        fixed={"hidden_act": "silu", "attention_bias": False}, sized_heads=True, rotary="part",
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        _RMS_MODEL | _NO_WINDOW | _EXPERTS | _QWEN_EXPERTS | _DELTA | _ANY_SECTIONS | _HEADS_OF_MTP
        | {"feed_forward_length": NoEffect("all layers have experts")},
        fixed={"hidden_act": "silu", "attention_bias": False}, sized_heads=True, rotary="part",
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        _RMS_MODEL | _NO_WINDOW | _EXPERTS | _QWEN_EXPERTS | _DELTA | _HEADS_OF_MTP,
        fixed={
            "hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        sized_heads=True, rotary="part",
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        _RMS_MODEL | _NO_WINDOW | _SCORED | _HEADS_OF_MTP
        | {"leading_dense_block_count": ToConfig("first_k_dense_replace")},
        fixed={"hidden_act": "silu", "n_group": 1, "topk_group": 1},
        present={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"}, sized_heads=True, rotary="part",
    ),
    "deepseek2": Architecture(
        "glm4_moe_lite",
        _RMS_MODEL | _NO_WINDOW | _SCORED | _NO_SCALING | _HEADS_OF_MTP
        | {
            "leading_dense_block_count": Consumed("how many of the first layers have no experts"),
            "attention.head_count_kv": MustBe((1,), "all heads share one latent"),
            "attention.q_lora_rank": ToConfig("q_lora_rank"),
            "attention.kv_lora_rank": ToConfig("kv_lora_rank"),
            "attention.key_length": Consumed("must be kv_lora_rank and rope.dimension_count together"),
            "attention.value_length": Consumed("must be kv_lora_rank"),
            "attention.key_length_mla": Consumed("the size of a head's queries and keys"),
            "attention.value_length_mla": ToConfig("v_head_dim"),
            "attention.temperature_scale": MustBe((0,), "eyas doesn't scale scores by position"),
            "attention.temperature_length": MustBe((0,), "eyas doesn't scale scores by position"),
            "expert_gating_func": MustBe((2,), "of this architecture, eyas reads models whose experts sigmoids choose"),
        },
        fixed={"hidden_act": "silu", "n_group": 1, "topk_group": 1, "rope_interleave": True, "attention_bias": False},
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        _SIZES | _NO_GROUPS | _HEADS | _NO_ROPE | _NO_WINDOW | _SCORED | _HEADS_OF_MTP
        | {
            "attention.layer_norm_epsilon": Consumed("must be layer_norm_rms_epsilon"),
            "attention.layer_norm_rms_epsilon": ToConfig("layer_norm_epsilon"),
            "attention.head_count_kv": Consumed("which layers attend, and their heads"),
            "feed_forward_length": Consumed("which layers have experts, and their size"),
            "expert_shared_feed_forward_length": ToConfig("moe_shared_expert_intermediate_size"),
            "expert_gating_func": MustBe((2,), "sigmoids choose this architecture's experts"),
            "moe_latent_size": ToConfig("moe_latent_size"),
            "ssm.conv_kernel": ToConfig("conv_kernel"),
            "ssm.state_size": ToConfig("ssm_state_size"),
            "ssm.group_count": ToConfig("n_groups"),
            "ssm.time_step_rank": ToConfig("mamba_num_heads"),
            "ssm.inner_size": Consumed("heads times their size"),
        },
        fixed={
            "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "n_group": 1, "topk_group": 1,
            "attention_bias": False, "mlp_bias": False, "use_bias": False, "mamba_proj_bias": False,
            "mtp_layers_block_type": ["full_attention", "moe"],
        },
        present={"use_conv_bias": "ssm_conv1d.bias"}, sized_heads=True, rotary="none",
    ),
}  # fmt: skip
"""llama.cpp's architectures that eyas takes as targets."""

GENERAL: Mapping[str, Treatment] = {
    "general.type": MustBe(("model",), "only a model's own file can be run"),
    "general.tensor_extra.prec_a4": MustBe((), "eyas doesn't round activations to 4 bits"),
    "split.count": MustBe((0, 1), "it is one part of a split model: merge the parts with llama-gguf-split --merge"),
}
"""Keys outside the architecture's that change what is computed; the others are descriptions, or the tokenizer's."""


class Keys:
    """The keys of a file while they are read; `take` and `finish` refuse by name what isn't computed with."""

    def __init__(self, file: Gguf) -> None:
        """Raises ModelError for an architecture that eyas doesn't take, and for keys in no table."""
        self.file = file
        self.path = file.path
        name = str(file.metadata.get("general.architecture"))
        if name not in ARCHITECTURES:
            raise ModelError(
                f"{self.path} is of llama.cpp's architecture {name}, and eyas reads these from GGUF files: "
                f"{', '.join(ARCHITECTURES)}; use the model's own folder"
            )
        self.name = name
        self.architecture = ARCHITECTURES[name]
        self.values = {
            key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")
        }
        if unknown := sorted(set(self.values) - set(self.architecture.keys)):
            named = ", ".join(f"{name}.{key} ({_shown(self.values[key])})" for key in unknown)
            raise ModelError(
                f"{self.path}: unknown key{'s' * (len(unknown) > 1)} {named}: eyas can't tell whether this "
                f"changes what is computed; {_REFUSED}"
            )
        for key, treatment in GENERAL.items():
            if key in file.metadata:
                self._check(key, file.metadata[key], treatment)
        for key, value in self.values.items():
            self._check(f"{name}.{key}", value, self.architecture.keys[key])

    def attributes(self) -> dict[str, Any]:
        """The config's attributes that keys give directly."""
        return {
            treatment.attribute: self._plain(key)
            for key, treatment in self.architecture.keys.items()
            if isinstance(treatment, ToConfig) and key in self.values
        }

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """A key's value; `default` if it is absent. Raises ModelError for another type."""
        if key not in self.values:
            return default
        value = self._plain(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.refuse(key, f"it isn't {_KINDS[kind]}")
        return value

    def need(self, key: str, kind: type) -> Any:
        """A key's value. Raises ModelError if it is absent, or not a positive number."""
        value = self.take(key, kind)
        if value is None:
            raise ModelError(f"{self.path} lacks the key {self.name}.{key}: download it again, or convert it again")
        if value <= 0:
            self.refuse(key, "it must be positive")
        return value

    def refuse(self, key: str, why: str) -> None:
        """Raise a ModelError that names a key."""
        raise ModelError(f"{self.path}: {self.name}.{key} is {_shown(self.values.get(key))}: {why}; {_REFUSED}")

    def _plain(self, key: str) -> Any:
        """A value; a list of equal numbers, one a layer, is the number."""
        value = self.values[key]
        if isinstance(value, list) and value and key in _PER_LAYER:
            if any(one != value[0] for one in value):
                self.refuse(key, "layers of different sizes are read from the model's own folder only")
            return value[0]
        return value

    def _check(self, key: str, value: Any, treatment: Treatment) -> None:
        if isinstance(treatment, MustBe) and value not in treatment.values:
            raise ModelError(f"{self.path}: {key} is {_shown(value)}: {treatment.why}; {_REFUSED}")


_PER_LAYER = frozenset(
    "feed_forward_length expert_feed_forward_length expert_used_count attention.head_count "
    "attention.head_count_kv".split()
)
"""Keys that may have a value for each layer."""
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _shown(value: Any) -> str:
    if isinstance(value, SkippedArray):
        return f"a list of {value.count}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def table() -> list[tuple[str, str, str]]:
    """Rows of a key, the architectures that have it, and what is done about it, for the page on GGUF files."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        for key, treatment in architecture.keys.items():
            rows.setdefault((key, _description(treatment)), []).append(name)
    found = [(key, _names(names), told) for (key, told), names in rows.items()]
    return sorted(found) + [(key, "all", _description(treatment)) for key, treatment in GENERAL.items()]


def _names(names: Sequence[str]) -> str:
    others = [name for name in ARCHITECTURES if name not in names]
    if len(names) <= len(others):
        return ", ".join(names)
    return f"all but {', '.join(others)}" if others else "all"


def _description(treatment: Treatment) -> str:
    match treatment:
        case ToConfig(attribute):
            return f"config's `{attribute}`"
        case Consumed(what):
            return what
        case MustBe((), why):
            return f"refused: {why}"
        case MustBe(values, why):
            return f"must be {' or '.join(str(value).lower() for value in values)}: {why}"
        case NoEffect(why):
            return f"changes nothing: {why}"
