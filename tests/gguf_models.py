"""Tiny targets written as GGUF files of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from . import tiny

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>{% endfor %}<|assistant|>"


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys in llama.cpp's order: the two halves that RoPE rotates are interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


UNWRITTEN = {
    "Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210), "IQ4_NL": (0, 2),
    "IQ4_XS": (0, 2), "NVFP4": (0, 4),
}  # fmt: skip
"""Bytes of the scales in a block, which are set to a number in half precision, or to its bytes; gguf can't write these
blocks, so they are random."""


def blocks_of(values: np.ndarray, kind: str) -> np.ndarray:
    """A matrix as blocks of a GGML type; random ones of its shape if gguf can't write them."""
    type_ = gguf.GGMLQuantizationType[kind]
    if kind not in UNWRITTEN:
        return values if kind == "F32" else gguf.quantize(values, type_)
    size, bytes_ = gguf.GGML_QUANT_SIZES[type_]
    drawn = np.random.default_rng(values.size).integers(0, 256, (values.size // size, bytes_), dtype=np.uint8)
    first, stop = UNWRITTEN[kind]
    drawn[:, first:stop] = np.full((stop - first) // 2, 0.0007, np.float16).view(np.uint8)
    return drawn.reshape(*values.shape[:-1], -1)


def write_llama(path: Path, kind: str = "F32", rule: str | None = "default", **others: int) -> Any:
    """Write a tiny random Llama to a GGUF file, matrices as blocks of a GGML type; returns the original model.

    `rule`: the tokenizer's rule for splitting text.
    """
    sizes = (256, 256) if kind in UNWRITTEN else (64, 128)  # rows of whole blocks
    model = tiny.build_model("llama", hidden_size=sizes[0], intermediate_size=sizes[1], **others)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {}
    for name, weight in model.state_dict().items():
        turned = heads.get(name.split(".")[-2])
        tensors[name.removesuffix(".weight")] = weight if turned is None else permuted(weight, turned)
    _write(path, gguf.MODEL_ARCH.LLAMA, model.config, tensors, kind, rule=rule)
    return model


def write_moe(path: Path, kind: str = "F32", down: str | None = None, **others: int) -> Any:
    """Like `write_llama`, for a Qwen3-MoE; `down`: another type for the experts' down projections."""
    size = 256 if kind in UNWRITTEN else 64
    sizes = {"hidden_size": size, "intermediate_size": size, "moe_intermediate_size": size, "head_dim": size // 4}
    model = tiny.build_model("qwen3moe", **sizes, **others)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name.endswith("gate_up_proj"):
            gates, ups = weight.chunk(2, dim=1)
            tensors |= {name.replace("gate_up", "gate"): gates, name.replace("gate_up", "up"): ups}
        else:
            tensors[name.removesuffix(".weight")] = weight
    _write(path, gguf.MODEL_ARCH.QWEN3MOE, model.config, tensors, kind, down)
    return model


def _write(
    path: Path,
    architecture: Any,
    config: Any,
    tensors: dict[str, torch.Tensor],
    kind: str,
    down: str | None = None,
    rule: str | None = "default",
) -> None:
    """Write tensors named by a model's modules; expert weights stay stacked."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    add_tokenizer(writer, config.vocab_size, rule)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in tensors.items():
        own = down if down is not None and weight.dim() == 3 and name.endswith("down_proj") else kind
        plain = weight.dim() == 1 or name.endswith("mlp.gate")  # routers are never quantized
        type_ = gguf.GGMLQuantizationType["F32" if plain else own]
        writer.add_tensor(
            f"{names.get_name(name)}.weight", blocks_of(weight.float().numpy(), type_.name), raw_dtype=type_
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, size: int, rule: str | None) -> None:
    """Add a byte-level BPE of `size` tokens: characters, two merges, and the end of a turn.

    There are two merges because transformers 5.17 mistakes a list of one for the merge itself.
    """
    letters = [chr(code) for code in range(33, 33 + size - 4)]
    tokens = [*letters, "cd", "ab", "<end>", "<pad>"]
    writer.add_tokenizer_model("gpt2")
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 2)
    writer.add_eot_token_id(size - 5)
    writer.add_pad_token_id(size - 1)
    writer.add_chat_template(TEMPLATE)


def write_vocabulary(path: Path, tokens: list[str], kinds: list[int], *, model: str = "llama", **keys: Any) -> Path:
    """A GGUF file with nothing but a tokenizer; keys are those of `tokenizer.ggml`, None leaves one out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(keys.pop("name", "tiny"))
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[
            type(value)
        ]
        add(f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def truncated(source: Path, path: Path, size: int) -> Path:
    """Write the first `size` bytes of a file to another."""
    path.write_bytes(np.fromfile(source, dtype=np.uint8)[:size].tobytes())
    return path
