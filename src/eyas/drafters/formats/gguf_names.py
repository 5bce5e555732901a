"""How llama.cpp's `eagle3` files name what the others call otherwise, and how they lay out queries and keys.

Shapes: N heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
"""GGUF name -> ours."""
ROPE_FACTORS = "rope_freqs.weight"
"""[D / 2]: what each rotation's frequency is divided by (llama3 scaling)."""

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
LAYERS, OLD_LAYERS = "target_layers", "extract_layers"

PROVENANCE, ROPE, TREE = "eyas.provenance", "eyas.rope_parameters", "eyas.default_tree"
"""What eyas writes beside them; llama.cpp passes over it."""


def side_by_side(weight: Tensor, heads: int) -> Tensor:
    """Rows [N * D, ...] whose rotated pairs lie D / 2 apart -> rows whose pairs lie side by side."""
    return torch.unflatten(weight, 0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape).contiguous()


def halves(weight: Tensor, heads: int) -> Tensor:
    """The way back."""
    return torch.unflatten(weight, 0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape).contiguous()
