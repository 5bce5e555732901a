"""Masked attention of few queries on a CPU, plugged in through transformers' own attention interface.

With a mask, transformers' `sdpa` copies the keys and values of a whole context once per query group before it
multiplies; the CPU kernel can share them between the groups itself, with the same result to the bit. On CUDA that
would select a slower kernel, so this is used on the CPU alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "eyas_cpu_sdpa"


def shared_heads_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, Q, D]
    key: Tensor,  # [B, kv_heads, K, D]
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa` where queries are grouped and masked alike for all heads; else the original."""
    odd = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias", "cache"))
    if attention_mask is None or attention_mask.shape[1] != 1 or dropout or odd:
        original: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return original
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


def use_shared_heads(model: Any) -> None:
    """Switch a model that runs transformers' `sdpa` over."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, shared_heads_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)  # for forwards that bring no mask of their own
        model.set_attn_implementation(NAME)
