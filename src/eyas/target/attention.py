"""Attention plugged in through transformers' own interface: rows that lie end to end, and few queries on a CPU.

A packed pass hands over queries [1, heads, T, D], but keys and values of R rows (the slot cache has spread them out).
The queries are padded here, run through whatever attention the model came with, and collected again; layers above
and below never see a padded token. Without a packed pass all calls go straight through.

On the CPU with a mask, transformers' `sdpa` copies the keys and values of a whole context once per query group before
it multiplies; `grouped_attention` shares them. On CUDA that may select a slower kernel, so it is used on the CPU alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from eyas.errors import UnsupportedModelError
from eyas.target.few_queries import grouped_attention
from eyas.target.ragged import Ragged

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""transformers' attention function: (module, query [B, H, Q, D], key, value, mask, ...) -> ([B, Q, H, Dv], weights)."""

_layout: ContextVar[Ragged | None] = ContextVar("eyas_layout", default=None)


@contextmanager
def packed(layout: Ragged | None) -> Iterator[None]:
    """Within the block the tokens of every pass lie as `layout` says; None = rows are of one length."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def _ragged_attention(
    inner: Attention,
    module: nn.Module,
    query: Tensor,  # [B, heads, Q, D], in a packed pass [1, heads, T, D]
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`inner`, its queries padded and its output [B, Q, heads, Dv] collected where rows lie end to end."""
    layout = _layout.get()
    if layout is None:
        return inner(module, query, *args, **kwargs)
    out, weights = inner(module, layout.spread(query), *args, **kwargs)
    return layout.pack(out), weights


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
    out = grouped_attention(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def _own_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """What a layer calls when told `eager`: the function of that name beside its class."""
    own: Attention | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise UnsupportedModelError(f"{type(module).__name__} brings no eager attention function of its own")
    return own(module, *args, **kwargs)


_KINDS: dict[tuple[str, bool], tuple[str, Attention, Any]] = {
    ("sdpa", True): ("eyas_cpu_sdpa", shared_heads_attention, sdpa_mask),
    ("sdpa", False): ("eyas_sdpa", sdpa_attention_forward, sdpa_mask),
    ("eager", True): ("eyas_eager", _own_attention, eager_mask),
    ("eager", False): ("eyas_eager", _own_attention, eager_mask),
}
"""(what a model runs, is it on a CPU) -> name, attention, masks for forwards that bring none of their own."""


def intercept(model: Any) -> bool:
    """Let a model that runs `sdpa` or `eager` attention run ours around it; False for any other."""
    if model.config._attn_implementation in {name for name, _, _ in _KINDS.values()}:
        return True
    made = _KINDS.get((model.config._attn_implementation, model.device.type == "cpu"))
    if made is None:
        return False
    name, inner, mask = made
    AttentionInterface.register(name, partial(_ragged_attention, inner))
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    return True
