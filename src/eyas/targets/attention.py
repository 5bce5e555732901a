"""Attention plugged in through transformers' own interface: rows that lie end to end, and few queries on a CPU.

A packed pass hands over queries [1, heads, T, D], but keys and values of R rows (the slot cache has spread them out).
The queries are padded here, run through whatever attention the model came with, and collected again; layers above
and below never see a padded token. Without a packed pass all calls go straight through.

On the CPU with a mask, transformers' `sdpa` copies the keys and values of a whole context once per query group before
it multiplies; `grouped_attention` shares them. On CUDA that may select a slower kernel, so it is used on the CPU alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from eyas.errors import UnsupportedModelError

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""transformers' attention function: (module, query [B, H, Q, D], key, value, mask, ...) -> ([B, Q, H, Dv], weights)."""

_layout: ContextVar[RaggedLayout | None] = ContextVar("eyas_layout", default=None)


@contextmanager
def use_layout(layout: RaggedLayout | None) -> Iterator[None]:
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
    out, weights = inner(module, layout.pad_heads(query), *args, **kwargs)
    return layout.gather(out), weights


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


# Attention of few queries: what decoding does, and what attention kernels are not made for.
#
# Where query heads share a key head, their queries can be rows of one product: the head is read once, and nothing is
# copied per group. The numbers stay within the kernel's own rounding. Measured on a CPU against `enable_gqa`: 1.1-1.8
# times faster at 4 queries; 7-12 times at a single query in bfloat16, where a lone row takes a slow path.
#
# Shapes: B rows, Q queries, K keys, G = heads / kv_heads, D / Dv head size of keys / values.


_FEW = 16
"""From here on a head's own queries fill the kernel."""
_LONE = 4
"""Copies of a lone bfloat16 or float16 query that make it quicker than by itself."""


def grouped_attention(
    query: Tensor,  # [B, heads, Q, D]
    key: Tensor,  # [B, kv_heads, K, D]
    value: Tensor,  # [B, kv_heads, K, Dv]
    mask: Tensor | None,  # as [B, 1, Q, K], bool or to be added: the same for all heads
    scale: float | None = None,  # None = D ** -0.5
) -> Tensor:
    """Softmax attention [B, heads, Q, Dv]."""
    heads, queries, size = query.shape[1:]
    groups = heads // key.shape[1]
    latent = key.shape[1] == 1 and size != value.shape[3]  # kernels would copy such keys for every head
    if queries >= _FEW and not latent:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
    rows = groups * queries
    if groups > 1:
        query = query.reshape(len(query), key.shape[1], rows, size)
        mask = None if mask is None else _for_all(mask, groups, rows)
    if rows == 1 and query.device.type == "cpu" and query.dtype != torch.float32:
        query = query.expand(-1, -1, _LONE, -1)
        mask = None if mask is None else _for_all(mask, 1, _LONE)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[:, :, :rows]
    return out.reshape(len(out), heads, queries, out.shape[3])


def _for_all(mask: Tensor, groups: int, rows: int) -> Tensor:
    """The mask [..., Q, K] of `rows` = groups * Q rows, group after group; one of a single row as a view."""
    if mask.shape[-2] == 1:
        return mask.expand(*mask.shape[:-2], rows, -1)
    return mask.repeat(*(1,) * (mask.dim() - 2), groups, 1)


# Attention masks of a pass over staged columns, one per attention type.
#
# Column c < start of row b holds the token at position c if c < length[b] (else it is stale or another row's staging);
# column start + i holds node i of the pass, which only its descendants may see. Shapes: R rows, Q columns of the pass,
# K = start + Q.


def visible(lengths: Tensor, start: int, ancestors: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """[R, 1, Q, K] bool: may query q see column k?

    lengths [R] committed tokens; ancestors [R or 1, Q, Q] bool, each column an ancestor of itself;
    positions [R, Q]; window: how many latest positions, its own included, a query sees (None = all).
    """
    rows, width = positions.shape
    columns = torch.arange(start, device=positions.device)
    committed = (columns < lengths.unsqueeze(1)).unsqueeze(1).expand(rows, width, start)
    staged = ancestors.expand(rows, width, width)
    if window is not None:
        oldest = positions.unsqueeze(2) - window  # [R, Q, 1]
        committed = committed & (columns > oldest)
        staged = staged & (positions.unsqueeze(1) > oldest)
    return torch.cat((committed, staged), dim=2).unsqueeze(1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, the lowest finite number elsewhere: what every attention implementation can add."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


# Rows of different lengths laid end to end, so that linears, norms and the head run on real tokens alone.
#
# Only attention knows rows: there queries, keys and values are spread out to the padded form, and what it puts out is
# collected again.
#
# Shapes: R rows, Q columns of the padded form, T real tokens, row after row, each row's in the order of its columns.


@dataclass(frozen=True)
class RaggedLayout:
    """Where the tokens of a pass lie."""

    index: Tensor  # [R, Q] int64: the token at each place; a place without one shows the token before it
    places: Tensor  # [T] int64: the place row * Q + column of each token

    @staticmethod
    def of(present: Tensor, total: int) -> RaggedLayout:
        """From `present` [R, Q] bool, of which `total` places are true; asks the device for nothing."""
        seen = present.flatten().cumsum(0)  # [R * Q] tokens up to and including each place
        ranks = torch.arange(1, total + 1, device=seen.device)
        return RaggedLayout((seen - 1).clamp(min=0).view(present.shape), torch.searchsorted(seen, ranks))

    @staticmethod
    def of_counts(counts: Sequence[int], device: torch.device) -> RaggedLayout:
        """Rows of `counts` tokens each; their padded form is as wide as the longest."""
        steps = torch.arange(max(counts), device=device)
        return RaggedLayout.of(steps < torch.tensor(list(counts), device=device).unsqueeze(1), sum(counts))

    def gather(self, padded: Tensor) -> Tensor:
        """[R, Q, ...] -> [1, T, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def pad(self, ragged: Tensor) -> Tensor:
        """[1, T, ...] -> [R, Q, ...]; places without a token show another one's."""
        return torch.unflatten(ragged[0].index_select(0, self.index.flatten()), 0, self.index.shape)

    def pad_heads(self, heads: Tensor) -> Tensor:
        """Queries, keys or values [1, H, T, D] -> [R, H, Q, D]."""
        return torch.unflatten(heads[0].index_select(1, self.index.flatten()), 1, self.index.shape).transpose(0, 1)
