"""The keys of GGUF files that llama.cpp reads for the architectures that eyas takes, and what eyas does about each.

llama.cpp computes a model from the keys of its own architecture alone; keys under other names are notes of whoever made
the file. A key of the architecture that is in no table, or has a value that eyas doesn't compute with, refuses the
file by name: it would run as another model. `benchmarks/gguf_targets.py` compares the tables with llama.cpp's sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from eyas.errors import ModelError
from eyas.gguf import Gguf, SkippedArray


@dataclass(frozen=True)
class Becomes:
    """The value becomes an attribute of transformers' config."""

    attribute: str


@dataclass(frozen=True)
class Used:
    """The value is read by `eyas.gguf_config`."""

    what: str


@dataclass(frozen=True)
class Must:
    """The value must be one of these, which is what the model computes anyway."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Nothing:
    """The value changes nothing that is computed."""

    why: str


Treatment: TypeAlias = Becomes | Used | Must | Nothing
_REFUSED = "running it anyway would be another model; use the model's own folder, or another file of it"

_SIZES: dict[str, Treatment] = {
    "vocab_size": Used("must be the embedding's rows"),
    "context_length": Becomes("max_position_embeddings"),
    "block_count": Becomes("num_hidden_layers"),
    "embedding_length": Becomes("hidden_size"),
    "feed_forward_length": Becomes("intermediate_size"),
    "embedding_length_out": Used("must be embedding_length"),
    "tensor_data_layout": Nothing("how Meta's own weights were permuted; the tensors are in llama.cpp's order"),
    "attention.causal": Must((True,), "eyas decodes from left to right"),
    "pooling_type": Must((0,), "eyas pools no embeddings"),
    "nextn_predict_layers": Must((0,), "eyas knows no MTP heads in this architecture"),
}  # fmt: skip
_DENSE: dict[str, Treatment] = {
    "expert_count": Must((0,), "this architecture's experts are read from its own folder only"),
    "expert_used_count": Must((0,), "this architecture's experts are read from its own folder only"),
    "expert_feed_forward_length": Must((0,), "this architecture's experts are read from its own folder only"),
    "expert_shared_feed_forward_length": Must((0,), "this architecture's experts are read from its own folder only"),
}
_NO_SHARED: dict[str, Treatment] = {
    "expert_shared_count": Must((0,), "no expert is shared in this architecture"),
    "expert_shared_feed_forward_length": Must((0,), "no expert is shared in this architecture"),
    "leading_dense_block_count": Must((0,), "the first layers aren't different in this architecture"),
}
_NO_GROUPS: dict[str, Treatment] = {
    "expert_group_count": Must((0, 1), "experts aren't grouped in this architecture"),
    "expert_group_used_count": Must((0, 1), "experts aren't grouped in this architecture"),
}
_HEADS: dict[str, Treatment] = {
    "attention.head_count": Becomes("num_attention_heads"),
    "attention.head_count_kv": Becomes("num_key_value_heads"),
    "attention.key_length": Used("the size of a head"),
    "attention.value_length": Used("must be key_length"),
    "attention.key_length_swa": Used("must be key_length"),
    "attention.value_length_swa": Used("must be key_length"),
}
_RMS: dict[str, Treatment] = {
    "attention.layer_norm_rms_epsilon": Becomes("rms_norm_eps"),
    "attention.layer_norm_epsilon": Nothing("all norms are RMS norms"),
}
_ROPE: dict[str, Treatment] = {
    "rope.dimension_count": Used("the rotated part of a head"),
    "rope.dimension_count_swa": Used("must be rope.dimension_count"),
    "rope.freq_base": Used("RoPE"),
    "rope.scaling.type": Used("RoPE"),
    "rope.scaling.factor": Used("RoPE"),
    "rope.scale_linear": Used("RoPE: the old name of rope.scaling.factor"),
    "rope.scaling.attn_factor": Used("RoPE"),
    "rope.scaling.original_context_length": Used("RoPE: yarn, and the limit of longrope's short factors"),
    "rope.scaling.finetuned": Nothing("how the model was trained"),
    "rope.scaling.alpha": Must((0,), "llama.cpp uses it in another architecture only"),
    "rope.scaling.yarn_ext_factor": Must((1,), "llama.cpp uses it in other architectures only"),
    "rope.scaling.yarn_beta_fast": Must((32,), "llama.cpp uses it in other architectures only"),
    "rope.scaling.yarn_beta_slow": Must((1,), "llama.cpp uses it in other architectures only"),
    "rope.scaling.yarn_log_multiplier": Must((0,), "llama.cpp uses it in other architectures only"),
    "rope.scaling.yarn_attn_factor": Used("must be the factor that llama.cpp computes from rope.scaling.factor"),
    "rope.dimension_sections": Must(([0, 0, 0, 0],), "positions here are plain numbers"),
}  # fmt: skip
_NO_ROPE: dict[str, Treatment] = {key: Nothing("this architecture has no RoPE") for key in _ROPE}
_HEADS_OF_MTP: dict[str, Treatment] = {
    "block_count": Used("layers, those of MTP heads included"),
    "nextn_predict_layers": Used("how many of the last layers are MTP heads, which draft"),
}
_SCORED: dict[str, Treatment] = {
    "expert_count": Becomes("n_routed_experts"),
    "expert_used_count": Becomes("num_experts_per_tok"),
    "expert_feed_forward_length": Becomes("moe_intermediate_size"),
    "expert_shared_count": Becomes("n_shared_experts"),
    "expert_gating_func": Must((2,), "sigmoids choose this architecture's experts"),
    "expert_weights_scale": Used("what the experts' sum is multiplied by"),
    "expert_weights_norm": Used("whether the chosen experts' weights are normalized"),
}
_DELTA: dict[str, Treatment] = {
    "ssm.conv_kernel": Becomes("linear_conv_kernel_dim"),
    "ssm.state_size": Becomes("linear_key_head_dim"),
    "ssm.group_count": Becomes("linear_num_key_heads"),
    "ssm.time_step_rank": Becomes("linear_num_value_heads"),
    "ssm.inner_size": Used("must be state_size times time_step_rank"),
    "full_attention_interval": Used("which layers attend"),
    "attention.recurrent_layers": Used("which layers attend"),
}
_QWEN_EXPERTS: dict[str, Treatment] = {
    "expert_shared_feed_forward_length": Becomes("shared_expert_intermediate_size"),
    "expert_shared_count": Must((0, 1), "this architecture has one shared expert"),
    "expert_weights_norm": Must((True,), "llama.cpp normalizes the weights of this architecture"),
    "leading_dense_block_count": Must((0,), "the first layers aren't different in this architecture"),
}
_ANY_SECTIONS: dict[str, Treatment] = {
    "rope.dimension_sections": Nothing("all sections have the same positions in text"),
}
_NO_SCALING: dict[str, Treatment] = {
    "rope.scaling.type": Must(("none", "linear"), "scaled RoPE is read from this architecture's own folder only"),
    "rope.scaling.factor": Must((0, 1), "scaled RoPE is read from this architecture's own folder only"),
    "rope.scale_linear": Must((0, 1), "scaled RoPE is read from this architecture's own folder only"),
}
_NO_WINDOW: dict[str, Treatment] = {
    "attention.sliding_window": Used("llama.cpp has no window here: must be 0 or cover the context"),
}
_EXPERTS: dict[str, Treatment] = {
    "expert_count": Becomes("num_experts"),
    "expert_used_count": Becomes("num_experts_per_tok"),
    "expert_feed_forward_length": Becomes("moe_intermediate_size"),
    "expert_gating_func": Must((1,), "a softmax chooses this architecture's experts"),
    "expert_weights_scale": Must((0, 1), "llama.cpp doesn't scale this architecture's experts"),
}
_WINDOW: dict[str, Treatment] = {
    "attention.sliding_window": Becomes("sliding_window"),
    "attention.sliding_window_pattern": Used("which layers have a window"),
}
_RMS_MODEL = _SIZES | _NO_GROUPS | _HEADS | _RMS | _ROPE


def _norms(attribute: str) -> dict[str, Treatment]:
    return {
        "attention.layer_norm_epsilon": Becomes(attribute),
        "attention.layer_norm_rms_epsilon": Nothing("all norms are layer norms"),
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
            "expert_shared_feed_forward_length": Becomes("shared_expert_intermediate_size"),
            "expert_weights_norm": Must((False,), "llama.cpp doesn't normalize the weights of this architecture"),
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
        | {"expert_weights_norm": Must((True,), "llama.cpp normalizes the weights of this architecture")},
        fixed={
            "hidden_act": "silu", "use_sliding_window": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        sized_heads=True,
    ),
    "phi3": Architecture(
        "phi3",
        _RMS_MODEL | _DENSE
        | {"attention.sliding_window": Becomes("sliding_window")},  # llama.cpp warns that it leaves the window out
        fixed={"hidden_act": "silu"}, rotary="part", factors=True,
    ),
    "gemma2": Architecture(
        "gemma2",
        _RMS_MODEL | _DENSE | _WINDOW
        | {
            "attn_logit_softcapping": Becomes("attn_logit_softcapping"),
            "final_logit_softcapping": Becomes("final_logit_softcapping"),
            "rope.freq_base_swa": Used("must be rope.freq_base"),
        },
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}, sized_heads=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _RMS_MODEL | _DENSE | _WINDOW
        | {
            "final_logit_softcapping": Becomes("final_logit_softcapping"),
            "attn_logit_softcapping": Must((0,), "llama.cpp caps no attention scores in this architecture"),
            "rope.freq_base_swa": Used("RoPE of the layers with a window"),
            "dense_2_feat_in": Nothing("for embeddings, whose tensors are refused"),
            "dense_2_feat_out": Nothing("for embeddings, whose tensors are refused"),
            "dense_3_feat_in": Nothing("for embeddings, whose tensors are refused"),
            "dense_3_feat_out": Nothing("for embeddings, whose tensors are refused"),
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
        | {"use_parallel_residual": Nothing("the tensors say it, whatever this says")},
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
            "feed_forward_length": Becomes("ffn_hidden_size"),
            "attention.head_count_kv": Must((1,), "only the first Falcon's one head of keys and values is read"),
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
            "context_length": Becomes("n_positions"),
            "block_count": Becomes("n_layer"),
            "embedding_length": Becomes("n_embd"),
            "feed_forward_length": Becomes("n_inner"),
            "attention.head_count": Becomes("n_head"),
            "attention.head_count_kv": Used("must be head_count"),
        },
        fixed={"activation_function": "gelu_new"}, rotary="none",
    ),
    "mamba": Architecture(
        "mamba",
        _SIZES | _NO_GROUPS | _DENSE | _NO_ROPE
        | {key: Nothing("this architecture has no attention") for key in _HEADS}
        | {
            "attention.layer_norm_rms_epsilon": Becomes("layer_norm_epsilon"),
            "context_length": Nothing("a recurrent state has no longest context"),
            "feed_forward_length": Must((0,), "this architecture has no feed-forward layers"),
            "attention.head_count": Must((0,), "this architecture has no attention"),
            "attention.head_count_kv": Must((0,), "this architecture has no attention"),
            "ssm.conv_kernel": Becomes("conv_kernel"),
            "ssm.inner_size": Becomes("intermediate_size"),
            "ssm.state_size": Becomes("state_size"),
            "ssm.time_step_rank": Becomes("time_step_rank"),
            "ssm.dt_b_c_rms": Must((False,), "FalconMamba's norms are read from its own folder only"),
            "ssm.group_count": Must((0, 1), "states aren't grouped in this architecture"),
        },
        fixed={"hidden_act": "silu", "use_bias": False, "use_conv_bias": True}, rotary="none",
    ),
    "lfm2": Architecture(
        "lfm2",
        _RMS_MODEL | _DENSE | _NO_WINDOW
        | {
            "attention.layer_norm_rms_epsilon": Becomes("norm_eps"),
            "attention.head_count_kv": Used("which layers attend, and their heads"),
            "shortconv.l_cache": Becomes("conv_L_cache"),
            "leading_dense_block_count": Nothing("all layers are dense"),
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
        | {"feed_forward_length": Nothing("all layers have experts")},
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
        | {"leading_dense_block_count": Becomes("first_k_dense_replace")},
        fixed={"hidden_act": "silu", "n_group": 1, "topk_group": 1},
        present={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"}, sized_heads=True, rotary="part",
    ),
    "deepseek2": Architecture(
        "glm4_moe_lite",
        _RMS_MODEL | _NO_WINDOW | _SCORED | _NO_SCALING | _HEADS_OF_MTP
        | {
            "leading_dense_block_count": Used("how many of the first layers have no experts"),
            "attention.head_count_kv": Must((1,), "all heads share one latent"),
            "attention.q_lora_rank": Becomes("q_lora_rank"),
            "attention.kv_lora_rank": Becomes("kv_lora_rank"),
            "attention.key_length": Used("must be kv_lora_rank and rope.dimension_count together"),
            "attention.value_length": Used("must be kv_lora_rank"),
            "attention.key_length_mla": Used("the size of a head's queries and keys"),
            "attention.value_length_mla": Becomes("v_head_dim"),
            "attention.temperature_scale": Must((0,), "eyas doesn't scale scores by position"),
            "attention.temperature_length": Must((0,), "eyas doesn't scale scores by position"),
            "expert_gating_func": Must((2,), "of this architecture, eyas reads models whose experts sigmoids choose"),
        },
        fixed={"hidden_act": "silu", "n_group": 1, "topk_group": 1, "rope_interleave": True, "attention_bias": False},
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        _SIZES | _NO_GROUPS | _HEADS | _NO_ROPE | _NO_WINDOW | _SCORED | _HEADS_OF_MTP
        | {
            "attention.layer_norm_epsilon": Used("must be layer_norm_rms_epsilon"),
            "attention.layer_norm_rms_epsilon": Becomes("layer_norm_epsilon"),
            "attention.head_count_kv": Used("which layers attend, and their heads"),
            "feed_forward_length": Used("which layers have experts, and their size"),
            "expert_shared_feed_forward_length": Becomes("moe_shared_expert_intermediate_size"),
            "expert_gating_func": Must((2,), "sigmoids choose this architecture's experts"),
            "moe_latent_size": Becomes("moe_latent_size"),
            "ssm.conv_kernel": Becomes("conv_kernel"),
            "ssm.state_size": Becomes("ssm_state_size"),
            "ssm.group_count": Becomes("n_groups"),
            "ssm.time_step_rank": Becomes("mamba_num_heads"),
            "ssm.inner_size": Used("heads times their size"),
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
    "general.type": Must(("model",), "only a model's own file can be run"),
    "general.tensor_extra.prec_a4": Must((), "eyas doesn't round activations to 4 bits"),
    "split.count": Must((0, 1), "it is one part of a split model: merge the parts with llama-gguf-split --merge"),
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
            if isinstance(treatment, Becomes) and key in self.values
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
            raise ModelError(f"{self.path} lacks the key {self.name}.{key}: download it again, or convert it anew")
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
        if isinstance(treatment, Must) and value not in treatment.values:
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
            rows.setdefault((key, _told(treatment)), []).append(name)
    found = [(key, _names(names), told) for (key, told), names in rows.items()]
    return sorted(found) + [(key, "all", _told(treatment)) for key, treatment in GENERAL.items()]


def _names(names: Sequence[str]) -> str:
    others = [name for name in ARCHITECTURES if name not in names]
    if len(names) <= len(others):
        return ", ".join(names)
    return f"all but {', '.join(others)}" if others else "all"


def _told(treatment: Treatment) -> str:
    match treatment:
        case Becomes(attribute):
            return f"config's `{attribute}`"
        case Used(what):
            return what
        case Must((), why):
            return f"refused: {why}"
        case Must(values, why):
            return f"must be {' or '.join(str(value).lower() for value in values)}: {why}"
        case Nothing(why):
            return f"changes nothing: {why}"
