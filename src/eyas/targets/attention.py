"""Attention of a target: masks over staged columns, ragged rows, and decode attention on a CPU.

A ragged pass runs rows of different lengths end to end, without padding, so that linears, norms and the head see only
real tokens. Only attention knows about rows. It is plugged in through transformers' own interface: queries arrive as
[1, heads, T, D], but keys and values as R rows, since the slot cache has padded them. Queries are padded here, run
through the model's own attention, and gathered again; no other layer sees a padded token. Rows of equal length are a
rectangle already and need no padding.

On a CPU, transformers' `sdpa` with a mask copies the keys and values of the whole context for every query group;
`grouped_attention` shares them. On CUDA that may select a slower kernel, so it is used only on a CPU.

Shapes: R rows, Q columns of a pass, T real tokens (row after row, each row's in the order of its columns), K columns of
keys (start + Q), D / Dv head size of keys / values.
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
from eyas.runtime import to_device
from eyas.targets.native.ops import native_attention
from eyas.tree import DraftTree


def columns_seen(lengths: Tensor, staged: Tensor, columns: Tensor) -> Tensor:
    """[R, Q, K] bool: whether query q sees each of `columns` [K].

    It sees the `lengths` [R] committed columns of its row, and those of the S staged columns behind them for which
    `staged` [R or 1, Q, S] is true. Columns behind these are stale.
    """
    offsets = columns - lengths.unsqueeze(1)  # [R, K]
    size = staged.shape[2]
    at = offsets.clamp(0, max(size - 1, 0)).unsqueeze(1).expand(-1, staged.shape[1], -1)
    behind = ((offsets >= 0) & (offsets < size)).unsqueeze(1)
    if not size:
        return (offsets < 0).unsqueeze(1).expand(-1, staged.shape[1], -1)
    return (offsets < 0).unsqueeze(1) | (behind & staged.expand(len(lengths), -1, -1).gather(2, at))


def visible(
    lengths: Tensor, start: int, ancestors: Tensor, positions: Tensor, window: int | None, staged: Tensor | None = None
) -> Tensor:
    """[R, 1, Q, K] bool: whether query q sees column k, in a pass over staged columns.

    Column c < lengths[r] of row r holds its token at position c. Column lengths[r] + i holds column i of the pass,
    which only its descendants may see. `lengths` [R] are numbers of committed tokens, `start` is the greatest of them.
    In `ancestors` [R or 1, Q, Q] bool, each column is its own ancestor. `positions` [R, Q] are the queries'. `window`
    is the number of latest positions that a query sees, including its own (None = all). If earlier passes staged some
    of the columns, `ancestors` [R, Q, S] and their positions `staged` [R, S] cover all S staged columns.
    """
    rows = len(positions)
    columns = torch.arange(start + ancestors.shape[2], device=positions.device)
    seen = ancestors.expand(rows, -1, -1)
    if window is None:
        return columns_seen(lengths, seen, columns).unsqueeze(1)
    oldest = positions.unsqueeze(2) - window  # [R, Q, 1]
    seen = seen & ((positions if staged is None else staged).unsqueeze(1) > oldest)
    late = (columns > oldest) | (columns >= lengths.unsqueeze(1)).unsqueeze(1)
    return (columns_seen(lengths, seen, columns) & late).unsqueeze(1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that any attention implementation can add: 0 where `seen`, the lowest finite number elsewhere."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


@dataclass(frozen=True)
class RaggedLayout:
    """Where the tokens of a ragged pass are in the padded form [R, Q], which consists of R x Q cells."""

    # Row 0 has a root and the nodes a and b, row 1 a root and the node c, so R = 2, Q = 3 and T = 5:
    #   tokens   [r0, a, b, r1, c]             as the linear layers see them, without padding
    #   padded   [r0, a, b | r1, c, -]         as attention sees them
    #   token_index = [[0, 1, 2], [3, 4, 4]]   the empty cell repeats c; no mask lets anything see it
    #   cell_index  = [0, 1, 2, 3, 4]
    # If b were valid and a were not, the pass would be [r0, b, r1, c]: token_index [[0, 0, 1], [2, 3, 3]], cell_index
    # [0, 2, 3, 4]. Valid cells may lie anywhere in a row.
    token_index: Tensor  # [R, Q] int64: the token in each cell; an empty cell repeats the token before it
    cell_index: Tensor  # [T] int64: the cell row * Q + column of each token

    @staticmethod
    def of(present: Tensor, total: int) -> RaggedLayout:
        """Make a layout from `present` [R, Q] bool, which is true in `total` cells, without a host sync."""
        seen = present.flatten().cumsum(0)  # [R * Q] tokens up to and including each cell
        ranks = torch.arange(1, total + 1, device=seen.device)
        return RaggedLayout((seen - 1).clamp(min=0).view(present.shape), torch.searchsorted(seen, ranks))

    @staticmethod
    def of_counts(counts: Sequence[int], device: torch.device) -> RaggedLayout:
        """Make a layout of rows with `counts` tokens; the padded form is as wide as the longest row."""
        steps = torch.arange(max(counts), device=device)
        return RaggedLayout.of(steps < to_device(list(counts), device).unsqueeze(1), sum(counts))

    @staticmethod
    def of_tree(tree: DraftTree) -> RaggedLayout | None:
        """The layout of roots and the trees' valid nodes; None = run padded: all are valid, or a count needs a sync."""
        if tree.full is not False:
            return None
        nodes = int(tree.valid.sum()) if tree.counted is None else tree.counted
        return RaggedLayout.of(F.pad(tree.valid, (1, 0), value=True), tree.valid.shape[0] + nodes)

    def gather(self, padded: Tensor) -> Tensor:
        """The real tokens of a padded tensor: [R, Q, ...] -> [1, T, ...]."""
        return padded.flatten(0, 1).index_select(0, self.cell_index).unsqueeze(0)

    def pad(self, ragged: Tensor) -> Tensor:
        """The padded form of a ragged tensor, with other tokens in empty cells: [1, T, ...] -> [R, Q, ...]."""
        flat = ragged[0].index_select(0, self.token_index.flatten())
        return torch.unflatten(flat, 0, self.token_index.shape)

    def pad_heads(self, heads: Tensor) -> Tensor:
        """The padded form of queries, keys or values: [1, H, T, D] -> [R, H, Q, D]."""
        flat = heads[0].index_select(1, self.token_index.flatten())
        return torch.unflatten(flat, 1, self.token_index.shape).transpose(0, 1)


_layout: ContextVar[RaggedLayout | None] = ContextVar("eyas_layout", default=None)


@contextmanager
def use_layout(layout: RaggedLayout | None) -> Iterator[None]:
    """Run every pass in the block as ragged with this `layout`; None = rows of equal length."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""transformers' attention function: (module, query [B, H, Q, D], key, value, mask, ...) -> ([B, Q, H, Dv], weights)."""


def intercept(model: Any) -> bool:
    """Wrap the attention of a model that runs `sdpa` or `eager`, so that it takes ragged rows; False for any other."""
    if model.config._attn_implementation in {name for name, _, _ in _WRAPPERS.values()}:
        return True
    wrapper = _WRAPPERS.get((model.config._attn_implementation, model.device.type == "cpu"))
    if wrapper is None:
        return False
    name, inner, mask = wrapper
    AttentionInterface.register(name, partial(_ragged_attention, inner))
    AttentionMaskInterface.register(name, mask)
    set_attention(model, name)
    return True


def cap_scores(model: Any) -> None:
    """Make a model with capped scores (Gemma 2) run `eager`: older transformers run `sdpa` without the cap."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        set_attention(model, "eager")


def set_attention(model: Any, name: str) -> None:
    """Make a model's decoder use the named attention; other towers of a multimodal model keep theirs."""
    config = model.config
    text = config.get_text_config()
    decoder = [key for key in config.sub_configs if getattr(config, key, None) is text]
    model.set_attn_implementation(dict.fromkeys(["", *decoder], name))


def _ragged_attention(
    inner: Attention,
    module: nn.Module,
    query: Tensor,  # [R, heads, Q, D], in a ragged pass [1, heads, T, D]
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run `inner`; in a ragged pass, pad its queries and gather its output [R, Q, heads, Dv]."""
    layout = _layout.get()
    if layout is None:
        return inner(module, query, *args, **kwargs)
    out, weights = inner(module, layout.pad_heads(query), *args, **kwargs)
    return layout.gather(out), weights


def cpu_sdpa(
    module: nn.Module,
    query: Tensor,  # [R, heads, Q, D]
    key: Tensor,  # [R, kv_heads, K, D]
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run native or `grouped_attention` if all heads share one mask, otherwise transformers' own `sdpa`."""
    odd = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias", "cache"))
    if attention_mask is None or attention_mask.shape[1] != 1 or dropout or odd:
        original: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return original
    native = native_attention(query, key, value, attention_mask, scaling)
    if native is not None:
        return native, None
    out = grouped_attention(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def _own_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run a layer's own `eager` attention: `eager_attention_forward` in the module of its class."""
    own: Attention | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no eager attention function of its own")
    return own(module, *args, **kwargs)


_WRAPPERS: dict[tuple[str, bool], tuple[str, Attention, Any]] = {
    ("sdpa", True): ("eyas_cpu_sdpa", cpu_sdpa, sdpa_mask),
    ("sdpa", False): ("eyas_sdpa", sdpa_attention_forward, sdpa_mask),
    ("eager", True): ("eyas_eager", _own_attention, eager_mask),
    ("eager", False): ("eyas_eager", _own_attention, eager_mask),
}
"""(a model's implementation, whether on a CPU) -> name, attention, mask function for forwards without a given mask."""

_KERNEL_QUERIES = 16
"""With this many queries or more, one head's queries are enough to fill the kernel."""
_SINGLE_ROW_COPIES = 4
"""A CPU computes this many copies of a single half-precision query faster than the query alone."""


def grouped_attention(
    query: Tensor,  # [R, heads, Q, D]
    key: Tensor,  # [R, kv_heads, K, D]
    value: Tensor,  # [R, kv_heads, K, Dv]
    mask: Tensor | None,  # broadcastable to [R, 1, Q, K], bool or additive: the same for all heads
    scale: float | None = None,  # None = D ** -0.5
) -> Tensor:
    """Softmax attention [R, heads, Q, Dv] for few queries, as in decoding, for which kernels aren't optimized.

    Where query heads share a key head, their queries become rows of one product: the keys are read once, and nothing is
    copied per group. Results stay within the kernel's own rounding. Measured on a CPU against `enable_gqa`: 1.1-1.8
    times faster at 4 queries; 7-12 times at a single query in bfloat16, where a single row takes a slow path.
    """
    heads, queries, size = query.shape[1:]
    groups = heads // key.shape[1]
    latent = key.shape[1] == 1 and size != value.shape[3]  # kernels would copy such keys for every head
    if queries >= _KERNEL_QUERIES and not latent:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
    rows = groups * queries
    if groups > 1:
        query = query.reshape(len(query), key.shape[1], rows, size)
        mask = None if mask is None else _repeat_mask(mask, groups, rows)
    if rows == 1 and query.device.type == "cpu" and query.dtype != torch.float32:
        query = query.expand(-1, -1, _SINGLE_ROW_COPIES, -1)
        mask = None if mask is None else _repeat_mask(mask, 1, _SINGLE_ROW_COPIES)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[:, :, :rows]
    return out.reshape(len(out), heads, queries, out.shape[3])


def _repeat_mask(mask: Tensor, groups: int, rows: int) -> Tensor:
    """Repeat a mask [..., Q, K] to `rows` = groups * Q rows, group after group; a view if it has a single row."""
    if mask.shape[-2] == 1:
        return mask.expand(*mask.shape[:-2], rows, -1)
    return mask.repeat(*(1,) * (mask.dim() - 2), groups, 1)
