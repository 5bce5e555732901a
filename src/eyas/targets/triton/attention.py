"""Attention of draft trees over the slot cache: a token's keys are summed by position, wherever their columns lie.

A token at position p sees one key for each position up to p: those of committed columns, and its own path's among the
staged ones; the slots of a drafter's block may see later positions, too. The keys of 256 positions are a split, summed
by one program; another launch merges a token's splits in order. So a token's sums are the same in a tree as once its
path is committed, and don't depend on other rows, on how many tokens a pass has, or on the cache's capacity.

A program computes 16 queries: of all heads that share a key, and of several tokens where the split's columns are the
same for all of them. Where columns are on a tree's branches, each token has a program of its own.

Shapes: T tokens, R rows, Q columns of a pass, C columns of the cache, D / Dv head size of keys / values, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.targets.triton.linear import SAME, Norm, given

SPLIT, _BLOCK = 256, 64
"""Positions of a split, and those whose keys are in one tile."""
_WIDE, _NARROW_BLOCK = 256, 16
"""Features of a head from which on a tile has fewer positions, so that it fits the shared memory."""
_QUERIES = 16
"""Queries of a tile: as few as the hardware multiplies at once."""


class Heads(NamedTuple):
    """How queries, keys and values lie in the output of a layer's first product, and how scores are made."""

    queries: int
    keys: int
    size: int
    scale: float
    softcap: float = 0.0
    in_turn: bool = False
    """Whether each head's query, key and value are side by side, instead of all queries, then keys, then values."""

    @property
    def width(self) -> int:
        """Number of features of a token's queries, keys and values."""
        return (self.queries + 2 * self.keys) * self.size


@dataclass(frozen=True)
class Tokens:
    """Where the tokens of a pass are: in which row, at which position, and behind which others."""

    cells: Tensor  # [T] int32 row * Q + column of each token
    tokens: Tensor  # [R, Q] int32 the token in each cell; -1 = none
    slots: Tensor  # [R] int32
    lengths: Tensor  # [R] int32 committed columns, which each row's staged columns follow
    rotations: Tensor  # [R, Q] int32 positions as RoPE takes them: within the context
    paths: Tensor | None
    """[R, Q, P] int32 the staged column of each depth on a cell's path; None = staged columns are a sequence."""
    end: int
    """End of the longest row's columns, or a later column."""
    before: int = 0
    """Number of columns of each row that earlier passes staged."""

    @property
    def columns(self) -> int:
        """Q."""
        return self.tokens.shape[1]

    @property
    def depths(self) -> int:
        """Number of positions behind the committed columns that a cell may see."""
        return self.before + self.columns if self.paths is None else self.paths.shape[2]


class Sight(NamedTuple):
    """The positions that each cell sees in a layer."""

    latest: Tensor  # [R, Q] int32
    oldest: Tensor | None = None  # [R, Q] int32, at least 0; None = 0


def paths_of(ancestors: Tensor, depth: Tensor) -> Tensor:
    """[R, Q, Q] int32: the column at each depth of a cell's path, from `ancestors` [R, Q, Q] bool and `depth` [R, Q].

    Entries beyond the cell's own depth are meaningless.
    """
    size = ancestors.shape[2]
    at = torch.where(ancestors, depth.unsqueeze(1), size)
    columns = torch.arange(size, dtype=torch.int32, device=at.device).expand_as(at)
    return at.new_zeros(*at.shape[:2], size + 1, dtype=torch.int32).scatter_(2, at, columns)[..., :size].contiguous()


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    x, starts, there, norm, eps, cosines, sines, turn, size: tl.constexpr, padded: tl.constexpr,
    rotated: tl.constexpr, norms: tl.constexpr, twice: tl.constexpr,
):  # fmt: skip
    """Heads [M, D] whose features begin at `starts` [M], normed over each head if it `norms`, and rotated."""
    dtype = x.dtype.element_ty
    feature = tl.arange(0, padded)
    half: tl.constexpr = rotated // 2
    turned = feature < rotated
    partner = tl.where(turned, tl.where(feature < half, feature + half, feature - half), feature)
    inside = there[:, None] & (feature < size)[None, :]
    own = tl.load(x + starts[:, None] + feature[None, :], inside, 0.0).to(tl.float32)
    other = own
    if rotated > 0:
        other = tl.load(x + starts[:, None] + partner[None, :], inside, 0.0).to(tl.float32)
    if norms:
        deviation = (1.0 / tl.sqrt_rn(tl.sum(own * own, axis=1) / size + eps))[:, None]
        own = own * deviation
        other = other * deviation
        if twice:
            own = own.to(dtype).to(tl.float32)
            other = other.to(dtype).to(tl.float32)
        own = (own * tl.load(norm + feature, feature < size, 0.0)[None, :]).to(dtype).to(tl.float32)
        other = (other * tl.load(norm + partner, feature < size, 0.0)[None, :]).to(dtype).to(tl.float32)
    if rotated > 0:
        cosine = tl.load(cosines + turn + feature, turned, 1.0)[None, :]
        sine = tl.load(sines + turn + feature, turned, 0.0)[None, :]
        straight = (own * cosine).to(dtype).to(tl.float32)
        across = (other * sine).to(dtype).to(tl.float32)
        across = tl.where((feature < half)[None, :], -across, across)
        own = tl.where(turned[None, :], straight + across, own)
    return own.to(dtype)


@triton.jit(do_not_specialize=["q_eps", "k_eps", "capacity", "columns", "before"])
def _place(  # type: ignore[no-untyped-def]
    qkv, made, keys, values, cells, slots, lengths, rotations, cosines, sines, q_norm, q_eps, k_norm, k_eps, capacity,
    columns, before, queries: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, padded: tl.constexpr,
    rotated: tl.constexpr, in_turn: tl.constexpr, q_norms: tl.constexpr, k_norms: tl.constexpr, q_twice: tl.constexpr,
    k_twice: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a token's queries that share a key, and the key, which is written to the cache with the value."""
    groups: tl.constexpr = queries // kv_heads
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    cell = tl.load(cells + token)
    row = cell // columns
    feature = tl.arange(0, padded)
    inside = feature < size
    turn = tl.load(rotations + cell).to(tl.int64) * rotated
    base = qkv + token * (queries + 2 * kv_heads) * size
    key = kv_head + tl.zeros([1], tl.int32)
    if in_turn:
        key_start = (key * 3 + 1) * size
        value_start = (kv_head * 3 + 2) * size
    else:
        key_start = (queries + key) * size
        value_start = (queries + kv_heads + kv_head) * size
    if groups > 0:
        lane = tl.arange(0, lanes)
        there = lane < groups
        head = kv_head * groups + lane
        starts = head * 3 * size if in_turn else head * size
        query = _rotated(
            base, starts, there, q_norm, q_eps, cosines, sines, turn, size, padded, rotated, q_norms, q_twice
        )
        place = (token * queries + head)[:, None] * size + feature[None, :]
        tl.store(made + place, query, there[:, None] & inside[None, :])
    turned = _rotated(
        base, key_start, key >= 0, k_norm, k_eps, cosines, sines, turn, size, padded, rotated, k_norms, k_twice
    )
    column = tl.load(lengths + row) + before + cell % columns
    slot = tl.load(slots + row).to(tl.int64)
    kept = ((slot * kv_heads + kv_head) * capacity + column) * size + feature
    tl.store(keys + kept[None, :], turned, inside[None, :])
    tl.store(values + kept, tl.load(base + value_start + feature, inside, 0.0), inside)


@triton.jit(do_not_specialize=["scale", "softcap", "capacity", "columns", "depths", "splits"])
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, sums, marks, tokens, slots, lengths, latest_seen, oldest_seen, paths, scale, softcap, capacity,
    columns, depths, splits, queries: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, padded: tl.constexpr,
    value_size: tl.constexpr, value_padded: tl.constexpr, split: tl.constexpr, block: tl.constexpr,
    sequence: tl.constexpr, caps: tl.constexpr, windows: tl.constexpr,
):  # fmt: skip
    """Sum one split of positions for 16 queries of a row that share a key head."""
    groups: tl.constexpr = queries // kv_heads
    tiles: tl.constexpr = (groups + 15) // 16
    each = columns * tiles  # programs per row, where each token has its own
    row = tl.program_id(0) // each
    tile = tl.program_id(0) % each
    kv_head = tl.program_id(1)
    number = tl.program_id(2)
    length = tl.load(lengths + row)
    first = number * split
    together = first + split <= length  # whether all columns are committed
    if sequence:
        together = first >= 0
    if (together & (tile * 16 >= columns * groups)) | (first >= length + depths):
        return
    lane = tl.arange(0, 16)
    pair = tile * 16 + lane
    column = tl.where(together, pair // groups, tile // tiles)
    group = tl.where(together, pair % groups, (tile % tiles) * 16 + lane)
    there = (column < columns) & (group < groups)
    cell = row * columns + tl.minimum(column, columns - 1)
    token = tl.load(tokens + cell, there, -1)
    there = there & (token >= 0)
    position = tl.load(latest_seen + cell, there, -1)
    oldest = tl.where(there, 0, 2147483647)
    if windows:
        oldest = tl.load(oldest_seen + cell, there, 2147483647)
    latest = tl.max(position, axis=0)
    if (latest < first) | (tl.min(oldest, axis=0) >= first + split):
        return
    head = kv_head * groups + group
    feature = tl.arange(0, padded)
    inside = feature < size
    query = (token.to(tl.int64) * queries + head) * size
    wanted = tl.load(q + query[:, None] + feature[None, :], there[:, None] & inside[None, :], 0.0)
    base = (tl.load(slots + row).to(tl.int64) * kv_heads + kv_head) * capacity
    part = tl.arange(0, value_padded)
    has_part = part < value_size
    most = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    summed = tl.zeros([16, value_padded], tl.float32)
    own = row * columns + tl.minimum(tile // tiles, columns - 1)  # the cell whose path is read, if each has its own
    for begin in range(0, tl.minimum(split, latest - first + 1), block):  # later positions are unseen
        at = first + begin + tl.arange(0, block)
        if sequence:
            where = at
            exists = at < length + depths
        else:
            depth = at - length
            staged = (depth >= 0) & (depth < depths)
            on_path = tl.load(paths + own * depths + depth, staged & (not together), 0)
            where = tl.where(depth < 0, at, length + on_path)
            exists = depth < depths
        seen = (at[None, :] <= position[:, None]) & (at[None, :] >= oldest[:, None]) & exists[None, :]
        place = base + where.to(tl.int64)
        key = tl.load(keys + place[None, :] * size + feature[:, None], exists[None, :] & inside[:, None], 0.0)
        scores = tl.dot(wanted, key, input_precision="ieee") * scale
        if caps:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - level[:, None])
        kept = tl.exp(most - level)
        value = tl.load(values + place[:, None] * value_size + part[None, :], exists[:, None] & has_part[None, :], 0.0)
        total = total * kept + tl.sum(weights, axis=1)
        summed = tl.dot(weights.to(value.dtype), value, summed * kept[:, None], input_precision="ieee")
        most = higher
    made = (token.to(tl.int64) * queries + head) * splits + number
    tl.store(marks + made * 2, most, there)
    tl.store(marks + made * 2 + 1, total, there)
    tl.store(sums + made[:, None] * value_padded + part[None, :], summed, there[:, None])


@triton.jit(do_not_specialize=["splits"])
def _merge(  # type: ignore[no-untyped-def]
    sums, marks, cells, latest_seen, oldest_seen, sinks, made, splits, queries: tl.constexpr, kv_heads: tl.constexpr,
    size: tl.constexpr, padded: tl.constexpr, split: tl.constexpr, has_sinks: tl.constexpr, windows: tl.constexpr,
    lanes: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a token in order, for the queries that share a key."""
    groups: tl.constexpr = queries // kv_heads
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)
    there = lane < groups
    head = tl.program_id(1) * groups + lane
    cell = tl.load(cells + token)
    latest = tl.load(latest_seen + cell)
    begin = latest * 0
    if windows:
        begin = tl.load(oldest_seen + cell) // split
    feature = tl.arange(0, padded)
    base = (token * queries + head) * splits
    most = tl.full([lanes], float("-inf"), tl.float32)
    total = tl.zeros([lanes], tl.float32)
    if has_sinks:
        most = tl.load(sinks + head, there, 0.0)
        total = total + 1.0
    summed = tl.zeros([lanes, padded], tl.float32)
    for number in range(begin, latest // split + 1):
        mark = tl.load(marks + (base + number) * 2, there, 0.0)
        higher = tl.maximum(most, mark)
        kept = tl.exp(most - higher)
        added = tl.exp(mark - higher)
        total = total * kept + tl.load(marks + (base + number) * 2 + 1, there, 1.0) * added
        part = tl.load(sums + (base + number)[:, None] * padded + feature[None, :], there[:, None], 0.0)
        summed = summed * kept[:, None] + part * added[:, None]
        most = higher
    place = (token * queries + head)[:, None] * size + feature[None, :]
    inside = there[:, None] & (feature < size)[None, :]
    tl.store(made + place, (summed / total[:, None]).to(made.dtype.element_ty), inside)


def place(
    qkv: Tensor, heads: Heads, keys: Tensor, values: Tensor, at: Tokens, rope: tuple[Tensor, Tensor] | None,
    q_norm: Norm | None = None, k_norm: Norm | None = None,
) -> Tensor:  # fmt: skip
    """Write tokens' keys and values from `qkv` to the cache; return their queries [T, heads, D]. See `attend`.

    With no queries among the `heads`, there are only keys and values in `qkv` [T, 2 kv_heads * D].
    """
    count = len(qkv)
    size = heads.size
    padded = max(16, triton.next_power_of_2(size))
    cosines, sines = rope or (keys, keys)
    q = torch.empty(count, heads.queries, size, dtype=qkv.dtype, device=qkv.device)
    norms = [norm or Norm(keys, 0.0, False, False) for norm in (q_norm, k_norm)]
    _place[(count, heads.keys)](
        qkv, q, keys, values, at.cells, at.slots, at.lengths, at.rotations, cosines, sines, norms[0].values,
        norms[0].eps, norms[1].values, norms[1].eps, keys.shape[2], at.columns, at.before, heads.queries, heads.keys,
        size, padded, 0 if rope is None else cosines.shape[1], heads.in_turn, q_norm is not None, k_norm is not None,
        norms[0].twice, norms[1].twice, _lanes(heads), num_warps=1, **SAME,
    )  # fmt: skip
    return q


def _lanes(heads: Heads) -> int:
    """Lanes of a program for the queries that share a key."""
    lanes: int = triton.next_power_of_2(max(1, heads.queries // heads.keys))
    return lanes


def attend(
    qkv: Tensor, heads: Heads, keys: Tensor, values: Tensor, at: Tokens, sight: Sight,
    rope: tuple[Tensor, Tensor] | None, q_norm: Norm | None = None, k_norm: Norm | None = None,
    sinks: Tensor | None = None, split: int = SPLIT,
) -> Tensor:  # fmt: skip
    """Attention [T, heads * D] of tokens whose queries, keys and values are `qkv` [T, (heads + 2 kv_heads) * D].

    Their keys and values are written to `keys` and `values` [slots, kv_heads, C, D] first. `rope` has cosines and sines
    [positions, rotated]; `sinks` [heads] float32 are scores of keys without a value.
    """
    q = place(qkv, heads, keys, values, at, rope, q_norm, k_norm)
    return attend_placed(q, heads, keys, values, at, sight, sinks, split)


def attend_placed(
    q: Tensor, heads: Heads, keys: Tensor, values: Tensor, at: Tokens, sight: Sight, sinks: Tensor | None = None,
    split: int = SPLIT,
) -> Tensor:  # fmt: skip
    """Attention [T, heads * Dv] of queries [T, heads, D] whose own keys and values are in the cache.

    Values [slots, kv_heads, C, Dv] may have another size than keys.
    """
    count = len(q)
    size, value_size = keys.shape[3], values.shape[3]
    padded, value_padded = (max(16, triton.next_power_of_2(each)) for each in (size, value_size))
    splits = triton.cdiv(at.end, split)
    sums = torch.empty(count, heads.queries, splits, value_padded, dtype=torch.float32, device=q.device)
    marks = torch.empty(count, heads.queries, splits, 2, dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(heads.queries // heads.keys, _QUERIES)
    oldest = given(sight.oldest, sight.latest)
    windows = sight.oldest is not None
    block = min(_BLOCK if padded <= _WIDE else _NARROW_BLOCK, split)
    _attend[(len(at.tokens) * at.columns * tiles, heads.keys, splits)](
        q, keys, values, sums, marks, at.tokens, at.slots, at.lengths, sight.latest, oldest, given(at.paths, at.tokens),
        heads.scale, heads.softcap, keys.shape[2], at.columns, at.depths, splits, heads.queries, heads.keys, size,
        padded, value_size, value_padded, split, block, at.paths is None, heads.softcap > 0, windows, **SAME,
    )  # fmt: skip
    made = torch.empty(count, heads.queries * value_size, dtype=q.dtype, device=q.device)
    _merge[(count, heads.keys)](
        sums, marks, at.cells, sight.latest, oldest, given(sinks, marks), made, splits, heads.queries, heads.keys,
        value_size, value_padded, split, sinks is not None, windows, _lanes(heads), **SAME,
    )  # fmt: skip
    return made
