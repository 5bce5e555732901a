"""The checkpoint formats in use, written out by hand: names, shapes and conventions, without any code of eyas.

Every function writes random weights and returns them under one set of names (`layers.{i}.*`), as a reader should return
them; d2t in the result is an offset.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V = 60
VD = 20
H = 16
HT = 24
MLP = 28
N = 4
KV = 2
D = 6
"""Sizes: vocabulary, draft vocabulary, widths of drafter, target and MLP, heads, key-value heads, head size."""
Q_RANK = 10
KV_RANK = 8
NOPE = 6
ROT = 4
VALUE = 5
Tensors = dict[str, Tensor]


def numbers(shapes: Mapping[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def grouped(width: int, layer: str, *, qkv: bool = False, out: bool = False, norms: bool = False) -> dict[str, Any]:
    at = f"{layer}.self_attn"
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.q_proj.weight": (N * D, width), f"{at}.k_proj.weight": (KV * D, width),
        f"{at}.v_proj.weight": (KV * D, width), f"{at}.o_proj.weight": (H, N * D),
    }  # fmt: skip
    if qkv:
        shapes |= {f"{at}.q_proj.bias": (N * D,), f"{at}.k_proj.bias": (KV * D,), f"{at}.v_proj.bias": (KV * D,)}
    if out:
        shapes |= {f"{at}.o_proj.bias": (H,)}
    if norms:
        shapes |= {f"{at}.q_norm.weight": (D,), f"{at}.k_norm.weight": (D,)}
    return shapes


def latent(layer: str, *, queries: bool = True) -> dict[str, Any]:
    at = f"{layer}.self_attn"
    ranked = {
        f"{at}.q_a_proj.weight": (Q_RANK, 2 * H),
        f"{at}.q_a_layernorm.weight": (Q_RANK,),
        f"{at}.q_b_proj.weight": (N * (NOPE + ROT), Q_RANK),
    }
    plain = {f"{at}.q_proj.weight": (N * (NOPE + ROT), 2 * H)}
    return (ranked if queries else plain) | {
        f"{at}.kv_a_proj_with_mqa.weight": (KV_RANK + ROT, 2 * H), f"{at}.kv_a_layernorm.weight": (KV_RANK,),
        f"{at}.kv_b_proj.weight": (N * (NOPE + VALUE), KV_RANK), f"{at}.o_proj.weight": (H, N * VALUE),
    }  # fmt: skip


def mlp(layer: str, *, bias: bool = False) -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.mlp.gate_proj.weight": (MLP, H), f"{layer}.mlp.up_proj.weight": (MLP, H),
        f"{layer}.mlp.down_proj.weight": (H, MLP), f"{layer}.post_attention_layernorm.weight": (H,),
    }  # fmt: skip
    if bias:
        shapes |= {f"{layer}.mlp.{part}_proj.bias": (MLP,) for part in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.bias": (H,)}
    return shapes


def third(attention: dict[str, Any], *, ht: int = H, taps: int = 3, vd: int = VD, bias: bool = False) -> dict[str, Any]:
    """Shapes of an EAGLE-3 drafter around an attention, without any optional tensor."""
    return {
        "fc.weight": (H, taps * ht), "layers.0.input_layernorm.weight": (H,), "layers.0.hidden_norm.weight": (H,),
        **attention, **mlp("layers.0", bias=bias), "norm.weight": (H,), "lm_head.weight": (vd, H),
    }  # fmt: skip


def offsets(seed: int = 3) -> tuple[Tensor, Tensor]:
    """A draft vocabulary: d2t [VD] and t2d [V]."""
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:VD].sort().values
    covered = torch.zeros(V, dtype=torch.bool)
    covered[ids] = True
    return ids - torch.arange(VD), covered


def midlayer(tensors: Tensors) -> Tensors:
    return {name.replace("layers.0.", "midlayer.", 1): t for name, t in tensors.items()}


def directory(path: Path, config: Mapping[str, Any], tensors: Tensors, *, pickled: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def llama_config(**changes: Any) -> dict[str, Any]:
    """The config keys that all native drafters share."""
    base = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": MLP,
        "num_attention_heads": N, "num_key_value_heads": KV, "num_hidden_layers": 1, "head_dim": D, "vocab_size": V,
        "draft_vocab_size": VD, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 512,
        "rope_theta": 5000.0, "torch_dtype": "float32", "tie_word_embeddings": False, "use_cache": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02, "pretraining_tp": 1,
        "transformers_version": "4.53.2", "attention_bias": False, "attention_dropout": 0.0,
    }  # fmt: skip
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


# GGUF, version 3: magic, counts, keys, tensor table, data at multiples of 32 bytes

_KINDS = {torch.float32: 0, torch.float16: 1, torch.int64: 27, torch.bfloat16: 30}


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """The encoded type and value of a metadata key."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def gguf_bytes(keys: Mapping[str, Any], tensors: Tensors, *, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(_text(key) + gguf_value(value) for key, value in keys.items())
    table, data = b"", b""
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % 32)
        shape = list(reversed(tensor.shape))
        table += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        table += struct.pack("<IQ", _KINDS[tensor.dtype], len(data))
        data += bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    return head + table + b"\0" * (-len(head + table) % 32) + data


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """A weight with each head's rows in llama.cpp's order: 0, D/2, 1, D/2 + 1, ..."""
    size = weight.shape[0] // heads
    order = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]
