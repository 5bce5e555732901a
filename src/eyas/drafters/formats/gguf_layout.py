"""Drafters in GGUF files: reading every supported architecture into native keys and names.

A `GgufLayout` describes the files of an architecture; the export writes by the same tables.
Shapes: N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafters.config import MAX_LAYERS
from eyas.drafters.files import Headers, RawCheckpoint, TensorInfo, parse_json
from eyas.drafters.window.layers import FULL_LAYER, SLIDING_LAYER
from eyas.errors import CheckpointError, ConfigError
from eyas.gguf import Gguf, SkippedArray

LAYERS = "target_layers"
"""The key of the boundaries that the drafter reads."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor [D / 2] of divisors of the frequencies, for llama3 scaling."""

PROVENANCE = "eyas.provenance"
ROPE = "eyas.rope_parameters"
TREE = "eyas.default_tree"
"""Additional keys that eyas writes; llama.cpp ignores them."""

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Key after the architecture's prefix -> config field of the same meaning, in all architectures."""

_TYPES = {"rms_norm_eps": float, "hidden_act": str, "norm_before_residual": bool, "norm_before_fc": bool}
"""The types of config fields that are not integers."""
_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_ROPE_KEYS = ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor")
_YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def _rope(file: Gguf, keys: dict[str, Any], where: str) -> dict[str, Any]:
    """The RoPE section; frequency factors become `longrope`, unless eyas stored the original section in the file."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _base(keys, "rope.freq_base", 10000.0, where)}
    if isinstance(written := file.metadata.get(ROPE), str):
        exact = parse_json(written, f"{ROPE} of {where}")
        if isinstance(exact, dict) and _as_float32(exact.get("rope_theta")) == _as_float32(keys.get("rope.freq_base")):
            return exact
        raise ConfigError(f"{where}: {ROPE} contradicts rope.freq_base: one of the two was changed")
    if ROPE_FACTORS in file.tensors:
        factors = [float(factor) for factor in file.load(ROPE_FACTORS)]
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": keys.get("context_length"),
        }
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{where}: rope.scaling.type {kind!r}: eyas reads none, linear and yarn")
    rope |= {"rope_type": kind, "factor": keys.get("rope.scaling.factor")}
    return rope | ({ours: keys[theirs] for theirs, ours in _YARN.items() if theirs in keys} if kind == "yarn" else {})


@dataclass(frozen=True)
class GgufLayout:
    """The layout of the files of one architecture."""

    architecture: str
    title: str
    """The name of such a drafter in messages."""
    tensors: Mapping[str, str]
    """Name in the file -> native name; `{}` is a layer's number in both."""
    keys: Mapping[str, str]
    """Key after the architecture's prefix -> config field of the same meaning, including `SIZES`."""
    more_keys: frozenset[str]
    """Additional keys that `settings` reads."""
    settings: Callable[[Gguf, dict[str, Any], str], dict[str, Any]]
    """(file, keys without the architecture's prefix, location for messages) -> the rest of the configuration.

    This includes the taps. Raises CheckpointError and ConfigError.
    """
    interleaved: bool
    """Whether rotated pairs of query and key channels are adjacent in the file, instead of half a head apart."""
    rope: Callable[[Gguf, dict[str, Any], str], dict[str, Any]] = _rope
    """Like `settings`: the RoPE section."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may be in the file and aren't loaded, and why."""

    def names(self, layers: int) -> dict[str, str]:
        """Name in the file -> native name, for a drafter with `layers` layers, at most `MAX_LAYERS`."""
        numbered = (
            (theirs.format(layer), ours.format(layer))
            for theirs, ours in self.tensors.items()
            for layer in (range(min(layers, MAX_LAYERS)) if "{}" in theirs else (0,))
        )
        return dict(numbered)

    def read(self, file: Gguf) -> RawCheckpoint:
        """Open a checkpoint of this architecture without reading weights. Raises CheckpointError and ConfigError."""
        path = file.path
        prefix = f"{self.architecture}."
        if file.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(f"{path} is one of several parts: join them with llama-gguf-split --merge")
        keys = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        known = {*self.keys, *self.more_keys, LAYERS, *_HEAD_SIZES, *_ROPE_KEYS, *_YARN}
        if unknown := sorted(set(keys) - known):
            raise ConfigError(f"{path}: unknown keys {', '.join(unknown)}: eyas can't tell what they change")
        config = self._config(file, keys, str(path))
        names = self.names(config.get("num_hidden_layers", 1))
        if odd := sorted(set(file.tensors) - set(names) - {ROPE_FACTORS, *self.left_out}):
            raise CheckpointError(f"{path} has tensors that no {self.title} network has: {', '.join(odd)}")
        found = {names[name]: TensorInfo(t.shape, t.dtype, path) for name, t in file.tensors.items() if name in names}
        return RawCheckpoint(
            path=path,
            format="GGUF (llama.cpp)",
            config=config,
            where=str(path),
            headers=Headers(found, [path.name]),
            load=lambda: self._load(file, config, list(found)),
            load_some=lambda wanted: self._load(file, config, wanted),
            used=sorted(prefix + key for key in keys),
            ignored={
                key: "the target's tokenizer" if key.startswith("tokenizer.") else "descriptive"
                for key in file.metadata
                if not key.startswith((prefix, "eyas."))
            }
            | {name: why for name, why in self.left_out.items() if name in file.tensors},
            notes=_notes(file),
            doubts=_doubts(keys) if CAUSAL in self.more_keys else [],
        )

    def _config(self, file: Gguf, keys: dict[str, Any], where: str) -> dict[str, Any]:
        """The configuration in the keys of config.json. Raises ConfigError."""
        config: dict[str, Any] = {ours: keys[theirs] for theirs, ours in self.keys.items() if theirs in keys}
        for key, value in config.items():
            kind = _TYPES.get(key, int)
            if type(value) is not kind:
                raise ConfigError(f"{where}: {key} is {value!r}, not of type {kind.__name__}")
        sizes = {keys[key] for key in _HEAD_SIZES if key in keys}
        if len(sizes) > 1:
            raise ConfigError(f"{where}: head sizes {sorted(sizes)}: keys, values and rotation must have the same size")
        config |= {"head_dim": next(iter(sizes))} if sizes else {}
        if "vocab_size" not in config:
            tokens = file.metadata.get("tokenizer.ggml.tokens")
            config["vocab_size"] = tokens.count if isinstance(tokens, SkippedArray) else len(tokens or ())
        if "d2t" in file.tensors:
            config["draft_vocab_size"] = file.tensors["d2t"].shape[0]
        config |= self.settings(file, keys, where)
        config["rope_parameters"] = self.rope(file, keys, where)
        if isinstance(provenance := file.metadata.get(PROVENANCE), str):
            config["eyas"] = parse_json(provenance, f"{PROVENANCE} of {where}")
        if isinstance(tree := file.metadata.get(TREE), str):
            config["default_tree"] = tree
        return config

    def _load(self, file: Gguf, config: dict[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors by native name, all in the matrices' dtype if that is exact: llama.cpp keeps some in float32."""
        in_file = self.names(config.get("num_hidden_layers", 1))
        found = {ours: file.load(theirs) for theirs, ours in in_file.items() if ours in names}
        if self.interleaved:
            for name, tensor in found.items():
                if heads := rotated_heads(name):
                    found[name] = to_halves(tensor, config[heads])
        if "d2t" in found:
            found["d2t"] = found["d2t"] - torch.arange(len(found["d2t"]))  # the file has target ids, eyas offsets
        floats = {name: t for name, t in found.items() if t.is_floating_point()}
        narrow = {t.dtype for t in floats.values() if t.ndim > 1} - {torch.float32}
        dtype = next(iter(narrow)) if len(narrow) == 1 else torch.float32
        if not all(torch.equal(t.to(dtype).to(t.dtype), t) for t in floats.values()):
            dtype = torch.float32
        return found | {name: t.to(dtype) for name, t in floats.items()}


def _notes(file: Gguf) -> list[str]:
    quantized = sorted({t.kind for t in file.tensors.values() if t.dtype.startswith("FQ")})
    return [f"quantized weights (GGML types {quantized}) are read as float32"] if quantized else []


def _doubts(keys: dict[str, Any]) -> list[str]:
    if CAUSAL in keys or not keys.get(WINDOW) or not any(keys.get(PATTERN) or ()):
        return []
    return [
        f"{CAUSAL} is missing: layers with a window are read as causal, as z-lab trains them and config.json means it; "
        "llama.cpp lets their slots see later ones"
    ]


def _base(keys: dict[str, Any], key: str, default: float, where: str) -> float:
    """The base of RoPE under a key. Raises ConfigError if it isn't a number."""
    base = keys.get(key, default)
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise ConfigError(f"{where}: {key} is {base!r}, not a number")
    return float(base)


def _as_float32(value: Any) -> float | None:
    """The number rounded to float32, the type of GGUF keys; None if it is not a number."""
    return float(torch.tensor(value, dtype=torch.float32)) if isinstance(value, int | float) else None


_ROTATED = {".self_attn.q_proj.weight": "num_attention_heads", ".self_attn.k_proj.weight": "num_key_value_heads"}


def rotated_heads(name: str) -> str | None:
    """The config field with the number of heads that a tensor's rows form; None if the rows are not rotated."""
    return next((heads for end, heads in _ROTATED.items() if name.endswith(end)), None)


def to_interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows [N * D, ...] from rotated pairs D / 2 apart to adjacent pairs."""
    return torch.unflatten(weight, 0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape).contiguous()


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows [N * D, ...] from adjacent rotated pairs to pairs D / 2 apart."""
    return torch.unflatten(weight, 0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape).contiguous()


def read_boundaries(keys: dict[str, Any], where: str, count: int | None = None) -> list[int]:
    """The list of boundaries, which must have `count` entries if given. Raises ConfigError."""
    taps = keys.get(LAYERS)
    if not isinstance(taps, list) or len(taps) != (count or len(taps)):
        number = "three " if count == 3 else ""
        raise ConfigError(f"{where}: {LAYERS} must list the {number}boundaries that the drafter reads")
    return taps


def open_gguf(path: Path) -> RawCheckpoint:
    """Open a file with one of `GGUF_LAYOUTS` without reading weights. Raises CheckpointError and ConfigError."""
    file = Gguf(path)
    architecture = file.metadata.get("general.architecture")
    layout = GGUF_LAYOUTS.get(architecture) if isinstance(architecture, str) else None
    if layout is None:
        known = " and ".join(GGUF_LAYOUTS)
        raise CheckpointError(f"{path} holds the architecture {architecture!r}: eyas reads drafters of {known}")
    return layout.read(file)


_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""A layer's tensors in files of both architectures."""
_EAGLE3_TENSORS = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    **{f"blk.0.{theirs}": f"layers.0.{ours}" for theirs, ours in _LAYER.items()},
    "blk.0.attn_norm_2.weight": "layers.0.hidden_norm.weight",
    "d2t": "d2t",
}
_OLD_LAYERS = "extract_layers"
"""The older key of the boundaries that the drafter reads."""


def _eagle3_settings(file: Gguf, keys: dict[str, Any], where: str) -> dict[str, Any]:  # noqa: ARG001
    """The taps, and the names by which the network is recognized. Raises ConfigError."""
    if LAYERS in keys and _OLD_LAYERS in keys and keys[LAYERS] != keys[_OLD_LAYERS]:
        raise ConfigError(
            f"{where}: {LAYERS} {keys[LAYERS]} and {_OLD_LAYERS} {keys[_OLD_LAYERS]} contradict each other"
        )
    taps = read_boundaries({LAYERS: keys.get(LAYERS, keys.get(_OLD_LAYERS))}, where, 3)
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "taps": taps}


EAGLE3_LAYOUT = GgufLayout(
    architecture="eagle3",
    title="EAGLE-3",
    tensors=_EAGLE3_TENSORS,
    keys=SIZES | {key: key for key in ("target_hidden_size", "norm_before_residual", "norm_before_fc")},
    more_keys=frozenset({_OLD_LAYERS}),
    settings=_eagle3_settings,
    interleaved=True,
)
"""llama.cpp's `eagle3` files."""

_NORMED_LAYER = _LAYER | {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_HEAD = "output.weight"
_EMBEDDING = "token_embd.weight"
_MARKOV = "markov_w1.weight"
_CONFIDENCE = "conf_proj.weight"
_SELECTOR = "selector_hidden.weight"
_DFLASH_TENSORS = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    _HEAD: "lm_head.weight",
    _EMBEDDING: "embed_tokens.weight",
    **{f"blk.{{}}.{theirs}": f"layers.{{}}.{ours}" for theirs, ours in _NORMED_LAYER.items()},
    "d2t": "d2t",
    _MARKOV: "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    _CONFIDENCE: "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    **{
        f"blk.{{}}.{theirs}_conv_{part}": f"layers.{{}}.{ours}_conv.{tensor}"
        for theirs, ours in (("attn", "attention"), ("ffn", "mlp"))
        for part, tensor in (("base", "base_kernel"), ("proj.weight", "kernel_projection.weight"))
    },
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    _SELECTOR: "candidate_selector.hidden_projection.weight",
}
EXACT = "_conv_base"
"""How the names of tensors end that llama.cpp adds to float32 values: they are float32 in files of any type."""
MASK = "tokenizer.ggml.mask_token_id"
"""The key of the token whose embedding fills the slots after the anchor."""
CAUSAL = "attention.causal"
WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
"""The keys of what slots see: whether only earlier slots, how far back, and in which layers that is so."""
_SECTIONS = "rope.dimension_sections"
_ANCHOR, _CONFIDENT = "sample_from_anchor", "has_confidence_head"
DFLASH2_KEYS = {key: key for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")}
"""Key that only files of DFlash 2 have -> config field of the same meaning."""


def _windows(keys: dict[str, Any], where: str) -> dict[str, Any]:
    """Windows and causality in the keys of config.json. Raises ConfigError.

    llama.cpp's converter leaves `attention.causal` out where config.json doesn't say: then layers with a window are
    causal, as they were trained, although llama.cpp itself lets slots see later ones there.
    """
    window, pattern, causal = (keys.get(key) for key in (WINDOW, PATTERN, CAUSAL))
    if causal is not None and not isinstance(causal, bool):
        raise ConfigError(f"{where}: {CAUSAL} is {causal!r}, not true or false")
    said = {} if causal is None else {"is_causal": causal}
    if pattern is None or not window:
        if window or (pattern is not None and any(pattern)):
            raise ConfigError(f"{where}: {WINDOW} and {PATTERN} need each other: one is missing")
        return said
    layers = keys.get("block_count")
    block = keys.get("block_size")
    if type(window) is not int or not isinstance(pattern, list) or len(pattern) != layers:
        raise ConfigError(
            f"{where}: {PATTERN} must say of each of the {layers} layers whether it has {WINDOW} {window}"
        )
    if causal is False and any(pattern) and isinstance(block, int) and block > window:
        raise ConfigError(
            f"{where}: {WINDOW} is {window} and block_size {block}: in llama.cpp a slot sees all later ones of its "
            "block, elsewhere only those in the window"
        )
    types = [SLIDING_LAYER if each else FULL_LAYER for each in pattern]
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": types, **said}


def _selector(file: Gguf, keys: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings of DFlash 2, empty for another drafter. Raises CheckpointError and ConfigError."""
    given = {key: keys[key] for key in DFLASH2_KEYS if keys.get(key)}
    if _SELECTOR not in file.tensors:
        if given:
            raise CheckpointError(f"{where}: {', '.join(given)} make it a DFlash 2 drafter, but {_SELECTOR} is missing")
        return {}
    for key in DFLASH2_KEYS:
        if type(given.get(key)) is not int:
            raise ConfigError(f"{where}: {key} is {given.get(key)!r}: a DFlash 2 drafter needs a whole number")
    for foreign in (_MARKOV, "d2t"):
        if foreign in file.tensors:
            raise CheckpointError(f"{where} has {foreign} besides {_SELECTOR}: eyas knows no such drafter")
    return {ours: given[theirs] for theirs, ours in DFLASH2_KEYS.items()}


def _dflash_settings(file: Gguf, keys: dict[str, Any], where: str) -> dict[str, Any]:
    """Taps, mask token, heads, and the names that identify the network. Raises CheckpointError and ConfigError."""
    sections = keys.get(_SECTIONS, [0])
    if not isinstance(sections, list) or any(sections[1:]):
        raise ConfigError(f"{where}: {_SECTIONS} {sections}: eyas rotates by one position per token")
    if _EMBEDDING in file.tensors and _HEAD not in file.tensors:
        raise CheckpointError(
            f"{where} has {_EMBEDDING} without {_HEAD}: llama.cpp takes the embedding for the head then, but a "
            "drafter's head is never its embedding; convert it again with both, or with neither"
        )
    config: dict[str, Any] = {"model_type": "qwen3", "taps": read_boundaries(keys, where)}
    config["mask_token_id"] = file.metadata.get(MASK)
    config |= _windows(keys, where)
    markov = file.tensors.get(_MARKOV)
    confidence = file.tensors.get(_CONFIDENCE)
    if markov is None and keys.get(_ANCHOR, False) is not False:
        raise ConfigError(f"{where}: {_ANCHOR} is true, but llama.cpp's DFlash blocks begin with a known token")
    selector = _selector(file, keys, where)
    if selector:
        return config | selector | {"architectures": ["DFlash2DraftModel"]}
    if markov is None:
        return config | {"architectures": ["DFlashDraftModel"]}
    config["markov_rank"] = markov.shape[-1]
    config["enable_confidence_head"] = confidence is not None
    if keys.get(_CONFIDENT, confidence is not None) is not (confidence is not None):
        raise ConfigError(f"{where}: {_CONFIDENT} is {keys[_CONFIDENT]}, but the tensors say otherwise")
    if confidence is not None:
        config["confidence_head_with_markov"] = confidence.shape[-1] != keys.get("embedding_length")
    return config | {"architectures": ["Qwen3DSparkModel"], _ANCHOR: keys.get(_ANCHOR, True)}


DFLASH_LAYOUT = GgufLayout(
    architecture="dflash",
    title="DFlash, DFlash 2 or DSpark",
    tensors=_DFLASH_TENSORS,
    keys=SIZES | {"block_size": "block_size", "hidden_activation": "hidden_act"},
    more_keys=frozenset({CAUSAL, WINDOW, PATTERN, _SECTIONS, _ANCHOR, _CONFIDENT, *DFLASH2_KEYS}),
    settings=_dflash_settings,
    interleaved=False,
)
"""llama.cpp's `dflash` files, which hold DFlash, DFlash 2 or DSpark drafters."""
DFLASH_HEADS = {_ANCHOR: "sample_from_anchor", _CONFIDENT: "enable_confidence_head"}
"""Key that only files with a Markov head have -> config field of the same meaning."""

_SHARED = "attention.shared_kv_layers"
_OF_KINDS = "attention.head_count_kv"


def _assistant_settings(file: Gguf, keys: dict[str, Any], where: str) -> dict[str, Any]:  # noqa: ARG001
    """The layers' types and heads, and the names that identify the network. Raises CheckpointError and ConfigError."""
    layers = keys.get("block_count")
    pattern = keys.get(PATTERN)
    if not isinstance(pattern, list) or len(pattern) != layers or not all(isinstance(one, bool) for one in pattern):
        raise ConfigError(f"{where}: {PATTERN} must say for each of {layers} layers whether it has a window")
    if keys.get("nextn_predict_layers") != layers:
        raise ConfigError(f"{where}: nextn_predict_layers {keys.get('nextn_predict_layers')}: it has {layers} layers")
    kinds = ["sliding_attention" if one else "full_attention" for one in pattern]
    heads = keys.get(_OF_KINDS)
    listed = heads if isinstance(heads, list) else [heads] * len(kinds)
    if len(listed) != len(kinds) or not all(type(one) is int for one in listed):
        raise ConfigError(f"{where}: {_OF_KINDS} must be one whole number, or one for each of {layers} layers")
    by_kind = dict(zip(kinds, listed, strict=True))
    if any(by_kind[kind] != count for kind, count in zip(kinds, listed, strict=True)):
        raise ConfigError(f"{where}: {_OF_KINDS} {listed}: layers of one type must have as many heads")
    full = keys.get("attention.key_length")
    windowed = {keys.get(key, full) for key in _WINDOWED_SIZES}
    if type(full) is not int or len(windowed) > 1:
        raise ConfigError(f"{where}: head sizes {sorted(windowed, key=str)}: keys, values and rotation must be equal")
    return {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "attention_k_eq_v": True,
        "layer_types": kinds, "head_dim": windowed.pop(), "global_head_dim": full,
        "num_key_value_heads": by_kind.get("sliding_attention", listed[-1]),
        "num_global_key_value_heads": by_kind.get("full_attention", listed[-1]),
    }  # fmt: skip


def _assistant_rope(file: Gguf, keys: dict[str, Any], where: str) -> dict[str, Any]:
    """RoPE of both types of layers. Of full ones, factors say which frequencies turn: 1 = does, 1e30 = does not."""
    if odd := [key for key in (*_ROPE_KEYS[1:], *_YARN) if keys.get(key, "none") != "none"]:
        raise ConfigError(f"{where}: {odd[0]}: eyas knows no assistant with scaled RoPE")
    bases = {
        kind: _base(keys, key, default, where)
        for kind, key, default in (
            ("full_attention", "rope.freq_base", 1e6),
            ("sliding_attention", "rope.freq_base_swa", 1e4),
        )
    }
    rope = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    if ROPE_FACTORS in file.tensors:
        factors = file.load(ROPE_FACTORS)
        if 2 * len(factors) != keys["attention.key_length"]:
            raise CheckpointError(f"{where}: {ROPE_FACTORS} has {len(factors)} numbers, which isn't half a head")
        turning = int((factors == 1).sum())
        if not (turning and bool((factors[:turning] == 1).all()) and bool((factors[turning:] >= 1e30).all())):
            raise ConfigError(f"{where}: {ROPE_FACTORS} scales frequencies: eyas reads ones, then 1e30")
        if turning < len(factors):
            part = {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}
            rope["full_attention"] |= part
    elif not all(keys.get(PATTERN, [False])):
        raise CheckpointError(f"{where} has no {ROPE_FACTORS}, which says how layers of full attention rotate")
    return rope


_WINDOWED_SIZES = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
_CAP = "final_logit_softcapping"
_CENTROIDS = "every token is scored, as in llama.cpp: the file doesn't say how many clusters"
ASSISTANT_LAYOUT = GgufLayout(
    architecture="gemma4-assistant",
    title="assistant",
    tensors={
        "token_embd.weight": "embed_tokens.weight",
        "output_norm.weight": "norm.weight",
        "nextn.pre_projection.weight": "pre_projection.weight",
        "nextn.post_projection.weight": "post_projection.weight",
        "blk.{}.attn_norm.weight": "layers.{}.input_layernorm.weight",
        "blk.{}.attn_q.weight": "layers.{}.self_attn.q_proj.weight",
        "blk.{}.attn_q_norm.weight": "layers.{}.self_attn.q_norm.weight",
        "blk.{}.attn_output.weight": "layers.{}.self_attn.o_proj.weight",
        "blk.{}.post_attention_norm.weight": "layers.{}.post_attention_layernorm.weight",
        "blk.{}.layer_output_scale.weight": "layers.{}.layer_scalar",
        "blk.{}.ffn_norm.weight": "layers.{}.pre_feedforward_layernorm.weight",
        "blk.{}.ffn_gate.weight": "layers.{}.mlp.gate_proj.weight",
        "blk.{}.ffn_up.weight": "layers.{}.mlp.up_proj.weight",
        "blk.{}.ffn_down.weight": "layers.{}.mlp.down_proj.weight",
        "blk.{}.post_ffw_norm.weight": "layers.{}.post_feedforward_layernorm.weight",
    },
    keys={ours: theirs for ours, theirs in SIZES.items() if ours != _OF_KINDS}
    | {
        "embedding_length_out": "backbone_hidden_size",
        WINDOW: "sliding_window",
        _SHARED: "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    },
    more_keys=frozenset({*_WINDOWED_SIZES, _OF_KINDS, PATTERN, "rope.freq_base_swa", "nextn_predict_layers", _CAP}),
    settings=_assistant_settings,
    rope=_assistant_rope,
    interleaved=False,
    left_out={"masked_embd_centroids.weight": _CENTROIDS, "masked_embd_ordering": _CENTROIDS},
)
"""llama.cpp's `gemma4-assistant` files. No reader caps an assistant's logits, whatever the file says."""

GGUF_LAYOUTS = {layout.architecture: layout for layout in (EAGLE3_LAYOUT, DFLASH_LAYOUT, ASSISTANT_LAYOUT)}
"""Architecture of a drafter's GGUF file -> its layout."""
