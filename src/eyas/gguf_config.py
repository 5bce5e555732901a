"""The config of a target in a GGUF file: what llama.cpp would compute from the file, in transformers' terms.

`Model.read` collects the file's facts, as `llama_model_base::load_hparams` and the architecture's own reader do.
`Model.config` states them in a config of transformers; `eyas.targets.gguf_check` compares them with the modules that
transformers then builds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.errors import ModelError
from eyas.gguf import Gguf
from eyas.gguf_keys import Consumed, Keys, ToConfig

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the config states; no module holds them."""
FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


@dataclass(frozen=True)
class Rope:
    """RoPE of the layers of one kind."""

    parameters: dict[str, Any]
    """As transformers' configs state it."""
    frequencies: Tensor
    """The angles [D / 2] float64 that a position adds, D the rotated part of a head."""
    factor: float
    """What sines and cosines are multiplied by."""


@dataclass(frozen=True)
class Model:
    """What a file's keys and the names of its tensors say about its model."""

    keys: Keys
    rows: int
    """Tokens in the vocabulary."""
    layers: int
    head: int
    """The size of a head; 0 without attention."""
    epsilon: float
    """Of all norms."""
    scale: float | None
    """What attention scores are multiplied by; None without attention."""
    kinds: tuple[str, ...]
    """Each layer's kind, in transformers' words."""
    window: int | None
    """Positions that layers of the sliding kind attend to."""
    ropes: dict[str, Rope]
    """RoPE of each kind of layer."""
    caps: tuple[float | None, float | None]
    """Soft caps of attention scores and of logits."""
    others: dict[str, Any]
    """Further attributes of the config."""

    @staticmethod
    def read(file: Gguf) -> Model:
        """Read a file. Raises ModelError for what eyas doesn't compute with, by name, and for missing keys."""
        keys = Keys(file)
        blocks = keys.need("block_count", int)
        width = keys.need("embedding_length", int)
        layers = blocks - keys.take("nextn_predict_layers", int, 0)
        if not 0 < layers <= blocks:
            keys.refuse("nextn_predict_layers", f"there are {blocks} layers in all")
        for head in range(layers, blocks):
            held = [name for name in file.tensors if name.startswith(f"blk.{head}.")]
            if held and f"blk.{head}.nextn.eh_proj.weight" not in held:
                keys.refuse("nextn_predict_layers", f"blk.{head} has no nextn.eh_proj.weight, so it is no MTP head")
        if keys.take("embedding_length_out", int, width) != width:
            keys.refuse("embedding_length_out", f"it isn't the width of {width}")
        head = _SIZE_OF_HEADS.get(keys.name, _head_size)(keys, width)
        kinds, window = _kinds(keys, layers)
        return Model(
            keys,
            _rows(keys),
            layers,
            head,
            _epsilon(keys),
            _scale(keys, layers, width, head),
            kinds,
            window,
            _ropes(keys, kinds, head),
            _caps(keys),
            _others(keys, layers, width, kinds),
        )

    def config(self) -> Any:
        """transformers' config. Raises ModelError if transformers refuses it."""
        from transformers import CONFIG_MAPPING

        architecture, metadata = self.keys.architecture, self.keys.file.metadata
        values = {
            **{f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()},
            **self.keys.attributes(), **architecture.fixed, **self.others,
            **{attribute: _present(self.keys, end) for attribute, end in architecture.present.items()},
            "vocab_size": self.rows, "tie_word_embeddings": "output.weight" not in self.keys.file.tensors,
        }  # fmt: skip
        if architecture.sized_heads:
            values["head_dim"] = self.head
        different = {id(rope): rope for rope in self.ropes.values()}
        if len(different) > 1:
            values["rope_parameters"] = {kind: rope.parameters for kind, rope in self.ropes.items()}
        elif different:
            values["rope_parameters"] = rope = different.popitem()[1].parameters
            if architecture.model_type == "phi3":  # its config prefers an attribute of its own
                values["original_max_position_embeddings"] = rope.get(
                    "original_max_position_embeddings", values["max_position_embeddings"]
                )
        try:
            return CONFIG_MAPPING[architecture.model_type](**values)
        except Exception as error:  # transformers raises anything for impossible values
            raise ModelError(f"{self.keys.path}: transformers refuses its sizes: {error}") from error


def heads_of(file: Gguf) -> range:
    """The layers of a file that are MTP heads by its keys; they follow the model's own."""
    name = file.metadata.get("general.architecture")
    counts = [file.metadata.get(f"{name}.{key}", 0) for key in ("block_count", "nextn_predict_layers")]
    if not all(type(count) is int for count in counts) or not 0 < counts[1] < counts[0]:
        return range(0)
    return range(counts[0] - counts[1], counts[0])


def is_companion(file: Gguf) -> bool:
    """Whether a file holds MTP heads, and not the layers of the model that they draft for."""
    return bool(heads_of(file)) and "blk.0.attn_norm.weight" not in file.tensors


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _present(keys: Keys, end: str) -> bool:
    return any(name.endswith(f".{end}") for name in keys.file.tensors)


def _rows(keys: Keys) -> int:
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{keys.path} has no embedding (token_embd.weight): download it again")
    rows = embedding.shape[0]
    if keys.take("vocab_size", int, rows) != rows:
        keys.refuse("vocab_size", f"the embedding has {rows} rows")
    return rows


def _head_size(keys: Keys, width: int) -> int:
    heads = keys.need("attention.head_count", int)
    whole, rest = divmod(width, heads)
    size: int = keys.take("attention.key_length", int, whole)
    if size <= 0 or (rest and "attention.key_length" not in keys.values):
        keys.refuse("attention.head_count", f"a width of {width} can't be split into so many heads")
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        if keys.take(key, int, whole if key == "attention.value_length" else size) != size:
            keys.refuse(key, f"keys have a size of {size}")
    if not keys.architecture.sized_heads and size * heads != width:
        keys.refuse("attention.key_length", f"{heads} heads must make up the width of {width} in this architecture")
    return size


def _latent_size(keys: Keys, width: int) -> int:  # noqa: ARG001  # the width says nothing
    """The size of a head's queries and keys in latent attention."""
    size = int(keys.need("attention.key_length_mla", int))
    rotated = keys.need("rope.dimension_count", int)
    rank = keys.need("attention.kv_lora_rank", int)
    keys.need("attention.value_length_mla", int)
    if rotated >= size:
        keys.refuse("rope.dimension_count", f"heads have a size of {size}")
    for key, expected in (("attention.key_length", rank + rotated), ("attention.value_length", rank)):
        if keys.take(key, int, expected) != expected:
            keys.refuse(key, f"latents have a size of {rank}, of which {rotated} more are rotated")
    return size


_SIZE_OF_HEADS: Mapping[str, Callable[[Keys, int], int]] = {"mamba": lambda *_: 0, "deepseek2": _latent_size}


def _epsilon(keys: Keys) -> float:
    own = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    kind = next(key for key in own if isinstance(keys.architecture.keys.get(key), ToConfig))
    return float(keys.need(kind, float))


def _scale(keys: Keys, layers: int, width: int, head: int) -> float | None:
    if not head:
        return None
    if (keys.name, layers) in _27B:
        head = width // int(keys.need("attention.head_count", int))
    return 1 / math.sqrt(head)


_27B = (("gemma2", 46), ("gemma3", 62))
"""The Gemmas whose scores are scaled by another number than the size of a head; llama.cpp knows them by their depth."""


def _kinds(keys: Keys, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Each layer's kind, and the window of those with one."""
    window = keys.take("attention.sliding_window", int, 4096 if keys.name == "gemma2" else 0)
    if keys.name == "gemma2" and window <= 0:
        keys.refuse("attention.sliding_window", "in llama.cpp, layers with it would attend to nothing")
    if keys.name == "lfm2":
        own = keys.values.get("attention.head_count_kv")
        heads = own if isinstance(own, list) else [own] * layers
        if len(heads) != layers or not all(isinstance(one, int) for one in heads) or len({*heads} - {0}) != 1:
            keys.refuse("attention.head_count_kv", f"it must be one number of heads, or 0, for each of {layers} layers")
        return tuple(FULL if one else "conv" for one in heads), None
    if keys.name == "nemotron_h_moe":
        return tuple(_nemotron(keys, layers)), None
    if "full_attention_interval" in keys.architecture.keys:
        return _recurrent(keys, layers), None
    if keys.name == "phi3" and window > 0:
        return (SLIDING,) * layers, window
    if keys.name in _PERIODS and window > 0:
        pattern = keys.values.get("attention.sliding_window_pattern", _PERIODS[keys.name])
        if isinstance(pattern, list):
            if len(pattern) != layers:
                keys.refuse("attention.sliding_window_pattern", f"there are {layers} layers")
            sliding: Sequence[Any] = pattern
        else:
            period = keys.take("attention.sliding_window_pattern", int, pattern)
            sliding = [period == 0 or layer % period < period - 1 for layer in range(layers)]
        return tuple(SLIDING if one else FULL for one in sliding), window
    if 0 < window < keys.take("context_length", int, 0):
        keys.refuse(
            "attention.sliding_window", "llama.cpp has no window in this architecture, the model's own code may"
        )
    return (FULL,) * layers, None


def _nemotron(keys: Keys, layers: int) -> Iterator[str]:
    """Yield the kind of each layer, which attends, has experts, or is recurrent."""
    blocks = keys.take("block_count", int)
    found = []
    for key in ("attention.head_count_kv", "feed_forward_length"):
        own = keys.values.get(key)
        values = own if isinstance(own, list) else [own] * blocks
        if len(values) != blocks or not all(type(one) is int and one >= 0 for one in values):
            keys.refuse(key, f"it must be one whole number for each of {blocks} layers")
        if len({*values} - {0}) != 1:
            keys.refuse(key, "layers of different sizes are read from the model's own folder only")
        found.append(values)
    for heads, width in list(zip(*found, strict=True))[:layers]:
        if heads and width:
            keys.refuse("feed_forward_length", "a layer that attends has no experts here")
        yield FULL if heads else "moe" if width else LINEAR


def _recurrent(keys: Keys, layers: int) -> tuple[str, ...]:
    """Kinds of layers, of which some have a linear attention; those of MTP heads are listed too, but never have one."""
    interval = keys.take("full_attention_interval", int, 4)
    if interval <= 0:
        keys.refuse("full_attention_interval", "it must be positive")
    listed = keys.values.get("attention.recurrent_layers", [bool((i + 1) % interval) for i in range(layers)])
    if not isinstance(listed, list) or len(listed) not in (layers, keys.take("block_count", int)):
        keys.refuse("attention.recurrent_layers", f"there are {layers} layers")
    return tuple(LINEAR if one else FULL for one in listed[:layers])


_PERIODS = {"gemma2": 2, "gemma3": 6}
"""Without a pattern, the last of so many layers has no window."""


def _caps(keys: Keys) -> tuple[float | None, float | None]:
    if keys.name == "gemma2":  # llama.cpp's defaults
        return _cap(keys, "attn_logit_softcapping", 50.0), _cap(keys, "final_logit_softcapping", 30.0)
    if keys.name == "gemma3":
        return None, keys.take("final_logit_softcapping", float) or None
    return None, None


def _cap(keys: Keys, key: str, default: float) -> float:
    cap = float(keys.take(key, float, default))
    if cap <= 0:
        keys.refuse(key, "it must be positive")
    return cap


def _others(keys: Keys, layers: int, width: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Attributes that are computed from several keys."""
    found: dict[str, Any] = {}
    heads = keys.take("attention.head_count", int, 0)
    if isinstance(keys.architecture.keys["block_count"], Consumed):
        found["num_hidden_layers"] = layers
    if "attention.head_count_kv" in keys.architecture.keys and keys.name not in _OWN_HEADS:
        found["num_key_value_heads"] = keys.take("attention.head_count_kv", int, heads)
    match keys.name:
        case "gpt2":
            if found.pop("num_key_value_heads") != heads:
                keys.refuse("attention.head_count_kv", f"there are {heads} heads")
        case "gemma2" | "gemma3":
            scale = _scale(keys, layers, width, _head_size(keys, width))
            found["query_pre_attn_scalar"] = round((scale or 1.0) ** -2)
            found["layer_types"] = list(kinds)
            found["attn_logit_softcapping"], found["final_logit_softcapping"] = _caps(keys)
            found["sliding_window"] = _kinds(keys, layers)[1] or 4096  # no layer reads it without a window
        case "phi3":
            found["sliding_window"] = _kinds(keys, layers)[1]
        case "lfm2":
            found["layer_types"] = list(kinds)
            own = keys.values["attention.head_count_kv"]
            found["num_key_value_heads"] = max(own) if isinstance(own, list) else own
        case "stablelm":
            found["use_parallel_residual"] = not _present(keys, "ffn_norm.weight")
        case "qwen2moe":
            every = keys.need("feed_forward_length", int)
            found["shared_expert_intermediate_size"] = keys.take("expert_shared_feed_forward_length", int, 0) or every
            found["moe_intermediate_size"] = _expert_size(keys)
        case "qwen3moe":
            found["moe_intermediate_size"] = _expert_size(keys)
        case "qwen35" | "qwen35moe" | "qwen3next":
            size = keys.need("ssm.state_size", int)
            values = keys.need("ssm.time_step_rank", int)
            if keys.take("ssm.inner_size", int, size * values) != size * values:
                keys.refuse("ssm.inner_size", f"{values} heads of values have a size of {size}")
            if values % keys.need("ssm.group_count", int):
                keys.refuse("ssm.group_count", f"{values} heads of values can't share so many")
            keys.need("ssm.conv_kernel", int)
            found["linear_value_head_dim"] = size
            found["layer_types"] = list(kinds)
            if keys.name != "qwen35":
                found["moe_intermediate_size"] = _expert_size(keys)
                every = keys.take("feed_forward_length", int, 0)
                found["shared_expert_intermediate_size"] = (
                    keys.take("expert_shared_feed_forward_length", int, 0) or every
                )
        case "nemotron_h_moe":
            heads_of_states = keys.need("ssm.time_step_rank", int)
            inner = keys.need("ssm.inner_size", int)
            if inner % heads_of_states:
                keys.refuse("ssm.inner_size", f"it can't be {heads_of_states} heads")
            found["mamba_head_dim"] = inner // heads_of_states
            found["layers_block_type"] = list(kinds)
            found["num_key_value_heads"] = max(keys.values["attention.head_count_kv"])
            found["moe_intermediate_size"] = keys.take("expert_feed_forward_length", int, 0) or max(
                keys.values["feed_forward_length"]
            ) // keys.need("expert_used_count", int)
            found["routed_scaling_factor"] = keys.take("expert_weights_scale", float, 0.0) or 1.0
            found["norm_topk_prob"] = keys.take("expert_weights_norm", bool, False)
            epsilon = keys.need("attention.layer_norm_rms_epsilon", float)
            if keys.take("attention.layer_norm_epsilon", float, epsilon) != epsilon:
                keys.refuse("attention.layer_norm_epsilon", f"that of other norms is {epsilon}")
        case "glm4moe" | "deepseek2":
            found["moe_intermediate_size"] = _expert_size(keys)
            found["routed_scaling_factor"] = keys.take("expert_weights_scale", float, 0.0) or 1.0
            found["norm_topk_prob"] = keys.take("expert_weights_norm", bool, False)
            dense = keys.take("leading_dense_block_count", int, 0)
            if not 0 <= dense <= layers:
                keys.refuse("leading_dense_block_count", f"there are {layers} layers")
            if keys.name == "glm4moe":
                found["first_k_dense_replace"] = dense
            else:
                found["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
                found["num_key_value_heads"] = heads
                found["qk_rope_head_dim"] = keys.need("rope.dimension_count", int)
                found["qk_nope_head_dim"] = _latent_size(keys, width) - found["qk_rope_head_dim"]
                found["q_lora_rank"] = keys.take("attention.q_lora_rank", int)
    shared = found.get("num_key_value_heads", 1)
    if shared <= 0 or heads % shared:
        keys.refuse("attention.head_count_kv", f"{heads} heads can't share so many")
    return found


_OWN_HEADS = ("mamba", "falcon", "lfm2", "deepseek2", "nemotron_h_moe")
"""Architectures whose heads of keys and values aren't simply counted."""


def _expert_size(keys: Keys) -> int:
    used = keys.need("expert_used_count", int)
    keys.need("expert_count", int)
    return int(keys.take("expert_feed_forward_length", int, 0) or keys.need("feed_forward_length", int) // used)


def _ropes(keys: Keys, kinds: tuple[str, ...], head: int) -> dict[str, Rope]:
    """RoPE of each kind of layer that has one; only Gemma 3's kinds differ."""
    for name in ROPE_TENSORS:
        if name in keys.file.tensors and not keys.architecture.factors:
            raise ModelError(f"{keys.path} holds {name}, which llama.cpp has no use for in this architecture")
    if keys.architecture.rotary == "none":
        return {}
    size = keys.take("rope.dimension_count", int, head)
    if keys.name == "deepseek2":  # transformers counts only the rotated part of a head
        head = size
    if not 0 < size <= head or size % 2 or (size != head and keys.architecture.rotary == "whole"):
        keys.refuse("rope.dimension_count", f"heads have a size of {head}")
    if keys.take("rope.dimension_count_swa", int, size) != size:
        keys.refuse("rope.dimension_count_swa", f"RoPE turns {size} features of a head")
    base = keys.take("rope.freq_base", float, 10000.0)
    if base <= 1:
        keys.refuse("rope.freq_base", "it must be more than 1")
    own = keys.take("rope.freq_base_swa", float)
    rope = _scaled(keys, base, size, head)
    if keys.name == "gemma2" and own not in (None, base):
        keys.refuse("rope.freq_base_swa", "transformers has one RoPE for all layers of this architecture")
    if keys.name == "gemma3":  # its layers with a window aren't scaled
        base = 10000.0 if own is None else own
        plain = {"rope_type": "default", "rope_theta": base}
        return {FULL: rope, SLIDING: Rope(plain, _plain(base, size), 1.0)}
    return {kind: rope for kind in kinds if kind != "conv"}


def _plain(base: float, size: int) -> Tensor:
    return base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)


def _original(keys: Keys) -> int:
    return int(keys.take("rope.scaling.original_context_length", int, 0) or keys.need("context_length", int))


def _scaled(keys: Keys, base: float, size: int, head: int) -> Rope:
    """RoPE as llama.cpp scales it (`llama_context`, `ggml_rope_ext`)."""
    kind = keys.take("rope.scaling.type", str, "linear")  # without a factor, that is no scaling
    if kind not in ("none", "linear", "yarn", "longrope"):
        keys.refuse("rope.scaling.type", "llama.cpp knows none, linear, yarn and longrope")
    factor = keys.take("rope.scaling.factor", float, keys.take("rope.scale_linear", float, 0.0)) or 1.0
    if keys.name == "gemma2" and kind == "none" and factor != 1:
        keys.refuse("rope.scaling.factor", "llama.cpp scales the layers with a window, although the type is none")
    factor = 1.0 if kind == "none" else factor
    by = keys.take("rope.scaling.attn_factor", float, 1.0)
    if min(factor, by) <= 0:
        keys.refuse("rope.scaling.factor", "factors must be positive")
    mscale = by * (1.0 + 0.1 * math.log(factor) if kind == "yarn" and factor > 1 else 1.0)
    written = keys.take("rope.scaling.yarn_attn_factor", float, mscale)
    if not math.isclose(written, mscale, rel_tol=1e-4):
        keys.refuse("rope.scaling.yarn_attn_factor", f"llama.cpp computes {mscale:.6g} in this architecture")
    part = {} if keys.architecture.rotary == "whole" else {"partial_rotary_factor": size / head}
    theta = {"rope_theta": base} | part
    short, long = _factors(keys, kind, size)
    original = _original(keys)
    kept = _yarn_ramp(size, base, original) if kind == "yarn" else torch.zeros(size // 2, dtype=torch.float64)

    def turned(divisors: Tensor) -> Tensor:
        frequencies = _plain(base, size) / divisors
        return frequencies / factor * (1 - kept) + frequencies * kept

    same = torch.equal(short, long)
    known: dict[str, Any] | None = None
    if same and bool((short == 1).all()):
        if kind == "yarn":
            known = {
                "rope_type": "yarn", "factor": factor, "attention_factor": mscale, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": original,
            }  # fmt: skip
        elif mscale == 1:
            known = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    elif same and factor == mscale == 1:
        known = _llama3(short, _plain(base, size))
    if known is None or (keys.name == "phi3" and known["rope_type"] != "default"):  # its config takes no other
        if same:  # one list for all lengths
            original = keys.need("context_length", int)
        known = {
            "rope_type": "longrope", "factor": max(1.0, keys.need("context_length", int) / original),
            "attention_factor": mscale, "original_max_position_embeddings": original,
            "short_factor": (_plain(base, size) / turned(short)).tolist(),
            "long_factor": (_plain(base, size) / turned(long)).tolist(),
        }  # fmt: skip
    return Rope(known | theta, turned(short), mscale)


def _factors(keys: Keys, kind: str, size: int) -> tuple[Tensor, Tensor]:
    """The divisors [D / 2] float64 of the frequencies in sequences up to the original context and in longer ones."""
    held = [name for name in ROPE_TENSORS if name in keys.file.tensors]
    by_length = kind == "longrope" or keys.name == "phi3"
    wanted = list(ROPE_TENSORS[1:] if by_length else ROPE_TENSORS[:1])
    if not held:
        ones = torch.ones(size // 2, dtype=torch.float64)
        return ones, ones
    if held != wanted:
        raise ModelError(
            f"{keys.path} holds {', '.join(held)}: with RoPE of type {kind}, llama.cpp reads {', '.join(wanted)}"
        )
    read = [keys.file.load(name).double() for name in held]
    for name, factors in zip(held, read, strict=True):
        if factors.shape != (size // 2,) or not bool((factors > 0).all() and factors.isfinite().all()):
            raise ModelError(f"{keys.path}: {name} must hold {size // 2} positive factors, one for each frequency")
    return read[-1], read[0]


def _yarn_ramp(size: int, base: float, original: int) -> Tensor:
    """The part [D / 2] of each frequency that yarn doesn't scale, as `rope_yarn` in ggml computes it."""

    def turning(times: float) -> float:
        """The index of the frequency that turns so often in the original context."""
        return size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first = max(0.0, math.floor(turning(32.0)))
    last = min(size - 1.0, math.ceil(turning(1.0)))
    return 1 - ((torch.arange(size // 2, dtype=torch.float64) - first) / max(0.001, last - first)).clamp(0, 1)


def _llama3(factors: Tensor, plain: Tensor) -> dict[str, Any] | None:
    """The `llama3` scaling that makes these divisors, with the numbers that every Llama 3 has; None if there is none.

    The original context isn't in the file.
    """
    factor = float(factors.max())
    if factor <= 1:
        return None
    for original in (2**power for power in range(6, 21)):
        kept = ((original * plain / (2 * math.pi) - 1.0) / (4.0 - 1.0)).clamp(0, 1)
        if torch.allclose(1 / ((1 - kept) / factor + kept), factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    return None
