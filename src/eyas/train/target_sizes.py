"""Sizes a drafter takes over from its target's config, whatever architecture that is."""

from __future__ import annotations

from typing import Any

from eyas.target.architecture import FULL

_THETA = 10000.0
_PLAIN_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies don't change with the length of a sequence."""
_LONG = 32768


def decoder_sizes(own: Any, max_length: int | None) -> dict[str, Any]:
    """MLP width, heads, norm and RoPE of a decoder like the target's. `own` is the target's text config."""
    return {
        "intermediate_size": getattr(own, "intermediate_size", None) or getattr(own, "n_inner", None)
        or 4 * own.hidden_size,
        "num_attention_heads": own.num_attention_heads,
        "max_position_embeddings": max_length or getattr(own, "max_position_embeddings", None) or _LONG,
        "rope_parameters": rope_of(own),
    }  # fmt: skip


def head_sizes(own: Any, heads: int, width: int) -> dict[str, int]:
    """Key-value heads and head size of grouped-query attention with `heads` heads, for a drafter `width` wide."""
    if getattr(own, "kv_lora_rank", None):  # latent attention: its head_dim is that of the rotated part alone
        return {"num_key_value_heads": heads, "head_dim": own.v_head_dim + own.v_head_dim % 2}
    shared = getattr(own, "num_key_value_heads", None) or heads
    if heads % shared:
        shared = heads
    return {
        "num_key_value_heads": shared,
        "head_dim": getattr(own, "head_dim", None) or max(2, width // heads // 2 * 2),
    }


def latent_sizes(own: Any) -> dict[str, int | None]:
    """Sizes of latent attention: the target's if it has some, else DeepSeek's proportions at this width."""
    if getattr(own, "kv_lora_rank", None):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {name: getattr(own, name) for name in names}
    head = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    rotated = max(2, head // 4 * 2)
    return {
        "q_lora_rank": None, "kv_lora_rank": 4 * head, "qk_nope_head_dim": head, "qk_rope_head_dim": rotated,
        "v_head_dim": head,
    }  # fmt: skip


def rope_of(own: Any) -> dict[str, Any]:
    """The target's RoPE, of its full-attention layers where they differ; theta alone where the type isn't plain."""
    rope = dict(getattr(own, "rope_parameters", None) or {})
    if isinstance(rope.get(FULL), dict):
        rope = dict(rope[FULL])
    theta = rope.get("rope_theta") or getattr(own, "rope_theta", None) or _THETA
    rope.pop("partial_rotary_factor", None)  # drafters rotate whole heads
    if rope.get("rope_type", "default") not in _PLAIN_TYPES:
        rope = {}
    return {"rope_type": "default", **rope, "rope_theta": theta}
