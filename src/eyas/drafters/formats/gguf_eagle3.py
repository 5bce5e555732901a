"""Reading llama.cpp's `eagle3` files into native keys and names.

The tables below are also what the export writes by. Shapes: N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafters.files import Headers, RawCheckpoint, TensorInfo, parse_json
from eyas.drafters.formats.gguf import Gguf, SkippedArray
from eyas.errors import CheckpointError, ConfigError

ARCHITECTURE = "eagle3"

TENSORS = {
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
"""Tensor name in the file -> native name."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor [D / 2] of factors that frequencies are divided by, for llama3 scaling."""

KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "target_hidden_size": "target_hidden_size",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
}
"""Key below `eagle3.` -> config field of the same meaning."""
LAYERS, _OLD_LAYERS = "target_layers", "extract_layers"
"""The keys of the boundaries that the drafter reads."""

PROVENANCE, ROPE, TREE = "eyas.provenance", "eyas.rope_parameters", "eyas.default_tree"
"""Further keys that eyas writes; llama.cpp ignores them."""

_ROPE_KEYS = ("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor")
_YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_READ = frozenset({*KEYS, LAYERS, _OLD_LAYERS, *_ROPE_KEYS, *_YARN, "attention.key_length", "attention.value_length"})


def read_gguf(path: Path) -> RawCheckpoint:
    """Open a file without reading weights. Raises CheckpointError and ConfigError."""
    file = Gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise CheckpointError(f"{path} holds the architecture {architecture!r}: eyas reads drafters of {ARCHITECTURE}")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path} is one of several parts: join them with llama-gguf-split --merge")
    own = {
        key.removeprefix(f"{ARCHITECTURE}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{ARCHITECTURE}.")
    }
    if unknown := sorted(set(own) - _READ):
        raise ConfigError(f"{path}: unknown keys {', '.join(unknown)}: eyas can't tell what they change")
    config = _config(file, own, str(path))
    unread = {ROPE_FACTORS} & set(file.tensors)
    if odd := sorted(set(file.tensors) - set(TENSORS) - unread):
        raise CheckpointError(f"{path} has tensors that no EAGLE-3 network has: {', '.join(odd)}")
    headers = Headers(
        {TENSORS[name]: TensorInfo(t.shape, t.dtype, path) for name, t in file.tensors.items() if name in TENSORS},
        [path.name],
    )
    return RawCheckpoint(
        path=path,
        format="GGUF (llama.cpp)",
        config=config,
        where=str(path),
        headers=headers,
        load=lambda: _load(file, config, list(headers.tensors)),
        load_some=lambda names: _load(file, config, names),
        used=sorted(f"{ARCHITECTURE}.{key}" for key in own),
        ignored={
            key: "the target's tokenizer" if key.startswith("tokenizer.") else "descriptive"
            for key in file.metadata
            if not key.startswith((f"{ARCHITECTURE}.", "eyas."))
        },
        notes=_notes(file),
    )


def _notes(file: Gguf) -> list[str]:
    quantised = sorted({t.kind for t in file.tensors.values() if t.dtype.startswith("FQ")})
    return [f"quantised weights (GGML types {quantised}) are read as float32"] if quantised else []


def _config(file: Gguf, own: dict[str, Any], where: str) -> dict[str, Any]:
    """The configuration in the keys of config.json. Raises ConfigError."""
    config: dict[str, Any] = {ours: own[theirs] for theirs, ours in KEYS.items() if theirs in own}
    for key, value in config.items():
        kind = bool if key.startswith("norm_") else float if key == "rms_norm_eps" else int
        if type(value) is not kind:
            raise ConfigError(f"{where}: {key} is {value!r}, not of type {kind.__name__}")
    taps = own.get(LAYERS, own.get(_OLD_LAYERS))
    if LAYERS in own and _OLD_LAYERS in own and own[LAYERS] != own[_OLD_LAYERS]:
        raise ConfigError(f"{where}: {LAYERS} {own[LAYERS]} and {_OLD_LAYERS} {own[_OLD_LAYERS]} contradict each other")
    if not isinstance(taps, list) or len(taps) != 3:
        raise ConfigError(f"{where}: {LAYERS} must list the three boundaries that the drafter reads")
    sizes = {own[key] for key in ("attention.key_length", "attention.value_length") if key in own}
    sizes |= {own["rope.dimension_count"]} if "rope.dimension_count" in own else set()
    if len(sizes) > 1:
        raise ConfigError(f"{where}: head sizes {sorted(sizes)}: keys, values and rotation must have one size")
    config |= {"head_dim": next(iter(sizes))} if sizes else {}
    if "vocab_size" not in config:
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        config["vocab_size"] = tokens.count if isinstance(tokens, SkippedArray) else len(tokens or ())
    if "d2t" in file.tensors:
        config["draft_vocab_size"] = file.tensors["d2t"].shape[0]
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "taps": taps}
    config["rope_parameters"] = _rope(file, own, where)
    if isinstance(provenance := file.metadata.get(PROVENANCE), str):
        config["eyas"] = parse_json(provenance, f"{PROVENANCE} of {where}")
    if isinstance(tree := file.metadata.get(TREE), str):
        config["default_tree"] = tree
    return config


def _rope(file: Gguf, own: dict[str, Any], where: str) -> dict[str, Any]:
    """The RoPE section; factors of frequencies become `longrope`, unless eyas wrote the section that they come from."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(own.get("rope.freq_base", 10000.0))}
    if isinstance(written := file.metadata.get(ROPE), str):
        exact = parse_json(written, f"{ROPE} of {where}")
        if isinstance(exact, dict) and _as_float32(exact.get("rope_theta")) == _as_float32(own.get("rope.freq_base")):
            return exact
        raise ConfigError(f"{where}: {ROPE} contradicts rope.freq_base: one of the two was changed")
    if ROPE_FACTORS in file.tensors:
        factors = [float(factor) for factor in file.load(ROPE_FACTORS)]
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": own.get("context_length"),
        }
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{where}: rope.scaling.type {kind!r}: eyas reads none, linear and yarn")
    rope |= {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    return rope | ({ours: own[theirs] for theirs, ours in _YARN.items() if theirs in own} if kind == "yarn" else {})


def _as_float32(value: Any) -> float | None:
    """The number rounded to float32, as keys of that type hold it; None for what is no number."""
    return float(torch.tensor(value, dtype=torch.float32)) if isinstance(value, int | float) else None


def _load(file: Gguf, config: dict[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors by native name, all in the matrices' type if it holds them: llama.cpp keeps vectors in float32."""
    found = {ours: file.load(theirs) for theirs, ours in TENSORS.items() if ours in names}
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        name = f"layers.0.self_attn.{part}.weight"
        if name in found:
            found[name] = to_halves(found[name], config[heads])
    if "d2t" in found:
        found["d2t"] = found["d2t"] - torch.arange(len(found["d2t"]))  # target ids are written, offsets are ours
    floats = {name: t for name, t in found.items() if t.is_floating_point()}
    narrow = {t.dtype for t in floats.values() if t.ndim > 1}
    dtype = next(iter(narrow)) if len(narrow) == 1 else torch.float32
    if not all(torch.equal(t.to(dtype).to(t.dtype), t) for t in floats.values()):
        dtype = torch.float32
    return found | {name: t.to(dtype) for name, t in floats.items()}


def to_interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows [N * D, ...] whose rotated pairs lie D / 2 apart so that the pairs lie side by side."""
    return torch.unflatten(weight, 0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape).contiguous()


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows [N * D, ...] whose rotated pairs lie side by side so that the pairs lie D / 2 apart."""
    return torch.unflatten(weight, 0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape).contiguous()
