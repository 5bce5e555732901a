"""A tiny random Gemma 4 and its assistants: models of transformers, their folders, and GGUF files of llama.cpp."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
from transformers.models.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

VOCAB = 98
HIDDEN = 32
WINDOW = 6
CENTROIDS = 14
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": 8, "global_head_dim": 16,
    "max_position_embeddings": 256, "sliding_window": WINDOW, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def _scattered(model: Any, seed: int) -> Any:
    """Weights so large that greedy output varies."""
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.requires_grad_(False)
        weight.normal_(std=0.3) if weight.dim() > 1 else weight.uniform_(0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.8, 1.2)
    return model.eval()


def target(seed: int = 0, **changes: Any) -> Any:
    """Six layers, full and sliding in turn, of which the last two have no keys of their own."""
    settings = {
        "hidden_size": HIDDEN, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": changes.get("vocab_size", VOCAB),
        "final_logit_softcapping": 30.0,
    }  # fmt: skip
    return _scattered(Gemma4ForCausalLM(Gemma4TextConfig(**{**_SIZES, **settings, **changes})), seed)


def assistant(centroids: bool, seed: int = 1, **changes: Any) -> Any:
    """Three layers, the last of full attention; `centroids`: the head scores only the tokens of the best clusters."""
    text = {
        "hidden_size": 16, "num_hidden_layers": 3, "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**{**_SIZES, **text, **changes}),
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=centroids,
        num_centroids=CENTROIDS,
        centroid_intermediate_top_k=4,
    )
    model = _scattered(Gemma4AssistantForCausalLM(config), seed)
    if centroids:
        model.masked_embedding.token_ordering.copy_(torch.randperm(config.text_config.vocab_size))
    return model


_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "pre_projection.weight": "nextn.pre_projection.weight", "post_projection.weight": "nextn.post_projection.weight",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""transformers' name of a tensor, or of a part of a layer -> llama.cpp's."""


def _name(name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if layer is None:
        return _NAMES[name]
    if layer[2] == "layer_scalar":
        return f"blk.{layer[1]}.layer_output_scale.weight"
    return f"blk.{layer[1]}.{_NAMES[layer[2].removesuffix('.weight')]}.weight"


ASSISTANT_KEYS: dict[str, Any] = {
    "block_count": 3, "context_length": 256, "embedding_length": 16, "feed_forward_length": 48,
    "attention.head_count": 4, "attention.head_count_kv": [2, 2, 1], "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 16, "attention.value_length": 16,
    "attention.sliding_window": WINDOW, "attention.shared_kv_layers": 3, "embedding_length_per_layer_input": 0,
    "attention.sliding_window_pattern": [True, True, False], "attention.key_length_swa": 8,
    "attention.value_length_swa": 8, "rope.dimension_count": 16, "rope.dimension_count_swa": 8,
    "embedding_length_out": HIDDEN, "nextn_predict_layers": 3, "vocab_size": VOCAB,
}  # fmt: skip
"""The keys that llama.cpp's converter writes for an assistant, without their prefix."""


def write_gguf(
    path: Path, model: Any, keys: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None
) -> Path:
    """An assistant in a GGUF file. `keys` and `tensors` replace what is written; None leaves it out."""
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    for key, value in {**ASSISTANT_KEYS, **(keys or {})}.items():
        full = f"gemma4-assistant.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif value is not None:
            writer.add_uint32(full, value)
    writer.add_tokenizer_model("none")
    held: dict[str, Tensor | None] = {
        _name(name): tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" and not name.startswith("masked_embedding")
    }
    held["rope_freqs.weight"] = torch.tensor([1.0] * 2 + [1e30] * 6)
    for name, tensor in {**held, **(tensors or {})}.items():
        if tensor is not None:
            writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
