"""Writes GGUF files for llama.cpp: `eagle3`, and `dflash`, which DSpark drafters are, too.

Layer numbers are boundaries, `d2t` holds target ids, and the target's byte-level BPE tokenizer is stored in GGUF's
keys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafters.config import GroupedConfig
from eyas.drafters.formats import gguf_dflash, gguf_eagle3
from eyas.drafters.formats.gguf_layout import (
    LAYERS,
    PROVENANCE,
    ROPE,
    ROPE_FACTORS,
    TREE,
    GgufLayout,
    rotated_heads,
    to_interleaved,
)
from eyas.drafters.kind import DFLASH, DSPARK, EAGLE3, Family
from eyas.errors import ExportError
from eyas.gguf import gguf_package
from eyas.interop.export.drafter import DrafterToExport

LAYOUTS: dict[Family, GgufLayout] = {
    EAGLE3: gguf_eagle3.LAYOUT,
    DFLASH: gguf_dflash.LAYOUT,
    DSPARK: gguf_dflash.LAYOUT,
}
"""What the files of each family hold that llama.cpp reads."""
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
"""Token types, as GGUF numbers them."""


def write_gguf(drafter: DrafterToExport, file: Path) -> None:
    """Write a prepared drafter. Raises ExportError, or UsageError if the gguf package isn't installed."""
    gguf = gguf_package()
    config = drafter.config
    assert isinstance(config, GroupedConfig)
    assert drafter.target is not None
    assert drafter.kind.family is not None
    layout = LAYOUTS[drafter.kind.family]
    if drafter.dtype not in _FILE_TYPES:
        raise ExportError(f"the weights are {drafter.dtype}, but llama.cpp reads float32, float16 and bfloat16")
    tokenizer = tokenizer_keys(drafter.target.tokenizer, config.vocab_size)
    writer = gguf.GGUFWriter(file, layout.architecture)
    writer.add_name(f"{layout.title} drafter")
    writer.add_file_type(_FILE_TYPES[drafter.dtype])
    _write_config(writer, layout, drafter)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")  # never used: llama.cpp tokenizes with the target's own tokenizer
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos),
        (writer.add_eos_token_id, tokenizer.eos),
        (writer.add_pad_token_id, tokenizer.pad),
        (writer.add_mask_token_id, drafter.get("mask_token_id")),
    ):
        if number is not None:
            add(number)
    for name, tensor in _tensors(drafter, layout, config).items():
        _add(writer, gguf, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, layout: GgufLayout, drafter: DrafterToExport) -> None:
    config, rope = drafter.config, drafter.get("rope_parameters")
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    keys = {**layout.keys, **(gguf_dflash.HEADS if drafter.kind.family == DSPARK else {})}
    for theirs, ours in keys.items():
        value = drafter.get(ours)
        adders[type(value)](f"{layout.architecture}.{theirs}", value)
    writer.add_array(f"{layout.architecture}.{LAYERS}", list(config.taps or ()))
    writer.add_key_length(drafter.get("head_dim"))
    writer.add_value_length(drafter.get("head_dim"))
    writer.add_rope_dimension_count(drafter.get("head_dim"))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{layout.architecture}.rope.scaling.type", rope["rope_type"])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or drafter.get("max_position_embeddings")
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32))
        writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1))
    writer.add_string(ROPE, json.dumps(rope))
    if config.default_tree is not None:
        writer.add_string(TREE, config.default_tree)
    if drafter.provenance:
        writer.add_string(PROVENANCE, json.dumps(dict(drafter.provenance)))


def _tensors(drafter: DrafterToExport, layout: GgufLayout, config: GroupedConfig) -> dict[str, Tensor]:
    """All tensors under llama.cpp's names and in its layout."""
    found = {}
    for theirs, ours in layout.names(config.num_hidden_layers).items():
        if ours not in drafter.tensors or (ours == "d2t" and not drafter.reduced):
            continue
        tensor = drafter.tensors[ours].detach().cpu()
        heads = rotated_heads(ours) if layout.interleaved else None
        if heads is not None:
            tensor = to_interleaved(tensor, drafter.get(heads))
        found[theirs] = tensor + torch.arange(len(tensor)) if ours == "d2t" else tensor
    if config.rope_parameters["rope_type"] == "llama3":
        found[ROPE_FACTORS] = llama3_factors(config)
    return found


def llama3_factors(config: GroupedConfig) -> Tensor:
    """The factors [D / 2] by which llama3 scaling divides each RoPE frequency."""
    rope = config.rope_parameters
    plain = rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    turns = rope["original_max_position_embeddings"] * plain / (2 * pi)  # within the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - share) / rope["factor"] + share)
    return factors.float()


def _add(writer: Any, gguf: Any, name: str, tensor: Tensor) -> None:
    """Add one tensor; vectors are written in float32, which llama.cpp's kernels require."""
    if tensor.dtype == torch.int64:
        writer.add_tensor(name, tensor.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
    elif tensor.ndim == 1:
        writer.add_tensor(name, tensor.float().numpy())
    elif tensor.dtype == torch.bfloat16:
        data = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.contiguous().numpy())


@dataclass(frozen=True)
class TokenizerKeys:
    """The values of GGUF's keys `tokenizer.ggml.*`."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int | None
    eos: int | None
    pad: int | None


def tokenizer_keys(tokenizer: Any, size: int) -> TokenizerKeys:
    """The keys for a byte-level BPE tokenizer and an embedding of `size` rows; ExportError for other tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = {} if backend is None else json.loads(backend.to_str())
    model = described.get("model", {})
    if model.get("type") != "BPE" or '"ByteLevel"' not in json.dumps(described.get("pre_tokenizer")):
        raise ExportError(
            "the target's tokenizer is not a byte-level BPE, the only type that eyas writes into GGUF: export with "
            "--to vllm and convert that folder with llama.cpp's convert_hf_to_gguf.py --target-model-dir"
        )
    tokens, types = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    for token, number in model["vocab"].items():
        if number < size:
            tokens[number], types[number] = token, _NORMAL
    for added in described.get("added_tokens", ()):
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added["special"] else _USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return TokenizerKeys(tokens, types, merges, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
