"""Attention in Triton over a slot cache: each node of a tree sees its path, with the bits of the path decoded alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from eyas.targets.attention import RaggedLayout
from eyas.targets.triton.attention import Heads, Sight, Tokens, attend, paths_of
from eyas.targets.triton.linear import Norm
from eyas.tree.draft_tree import ancestor_mask, cells

CAPACITY = 96
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3}


class Case(NamedTuple):
    """Options of attention."""

    heads: Heads
    window: int = 0
    rotated: int = 16
    norms: bool = False
    sinks: bool = False


CASES = {
    "grouped": Case(Heads(4, 2, 16, 0.25)),
    "capped, in a window": Case(Heads(2, 1, 24, 0.3, 2.0), 5, 8),
    "sinks and norms": Case(Heads(3, 3, 16, 0.25), norms=True, sinks=True),
    "in turn, no RoPE": Case(Heads(2, 2, 16, 0.25, in_turn=True), rotated=0),
    "many queries of a key": Case(Heads(20, 1, 16, 0.25)),
}


def _tokens(
    lengths: list[int], parents: list[int], layout: RaggedLayout | None = None, sequence: bool = False
) -> tuple[Tokens, Tensor]:
    """Tokens of trees of one shape behind rows of these lengths, and which columns of the pass each cell sees.

    Nothing limits the positions that RoPE takes, so they are those of the cells.
    """
    count, columns = len(lengths), len(parents) + 1
    ancestors = ancestor_mask(torch.tensor([parents] * count).view(count, columns - 1), columns)
    depth = ancestors.sum(-1) - 1
    rows = torch.tensor(lengths, dtype=torch.int32)
    positions = (rows.unsqueeze(1) + depth).int()
    own = cells(count, columns, rows.device).int()
    of_tokens, tokens = own.flatten(), own
    if layout is not None:
        of_tokens = layout.cell_index.int()
        tokens = torch.full_like(own.flatten(), -1)
        tokens[layout.cell_index] = torch.arange(len(of_tokens), dtype=torch.int32)
        tokens = tokens.view(own.shape)
    slots = torch.arange(count, dtype=torch.int32)
    paths = None if sequence else paths_of(ancestors, depth)
    return Tokens(of_tokens, tokens, slots, rows, positions, paths, max(lengths) + columns), ancestors


def _parts(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, heads, D]."""
    if heads.in_turn:
        query, key, value = qkv.view(len(qkv), heads.queries, 3, heads.size).unbind(2)
        return query, key, value
    sizes = [heads.queries, heads.keys, heads.keys]
    query, key, value = qkv.view(len(qkv), -1, heads.size).split(sizes, dim=1)
    return query, key, value


def _rotated(x: Tensor, rope: tuple[Tensor, Tensor] | None, positions: Tensor) -> Tensor:
    if rope is None:
        return x
    cosines, sines = (part[positions.long()].unsqueeze(1) for part in rope)
    size = cosines.shape[-1]
    turned = x[..., :size]
    left, right = turned.tensor_split(2, dim=-1)
    return torch.cat((turned * cosines + torch.cat((-right, left), dim=-1) * sines, x[..., size:]), dim=-1)


def _expected(
    case: Case, qkv: Tensor, keys: Tensor, values: Tensor, at: Tokens, seen: Tensor, rope: tuple[Tensor, Tensor] | None,
    norms: tuple[Norm, Norm] | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention in float64, token by token."""
    heads = case.heads
    query, key, value = _parts(qkv.double(), heads)
    if norms is not None:
        query, key = (
            part * torch.rsqrt(part.square().mean(-1, keepdim=True) + norm.eps) * norm.values
            for part, norm in zip((query, key), norms, strict=True)
        )
    positions = at.rotations.flatten()[at.cells.long()]
    query, key = _rotated(query, rope, positions), _rotated(key, rope, positions)
    made = []
    for token, cell in enumerate(at.cells.tolist()):
        row, column = divmod(cell, at.columns)
        length, position = int(at.lengths[row]), int(positions[token])
        path = [other for other in range(at.columns) if seen[row, column, other]]
        staged = [int(at.tokens[row, other]) for other in path]
        for head in range(heads.queries):
            group = head // (heads.queries // heads.keys)
            all_keys = torch.cat((keys[row, group, :length].double(), key[staged, group]))
            all_values = torch.cat((values[row, group, :length].double(), value[staged, group]))
            first = max(0, position - case.window + 1) if case.window else 0
            scores = all_keys[first:] @ query[token, head] * heads.scale
            if heads.softcap:
                scores = heads.softcap * torch.tanh(scores / heads.softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = scores.softmax(0)[: len(all_keys) - first]
            made.append(weights @ all_values[first:])
    return torch.stack(made).view(len(at.cells), -1)


class Setting:
    """Random inputs of a case."""

    def __init__(self, name: str, rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.case, heads = CASES[name], CASES[name].heads
        self.qkv = torch.randn(tokens, heads.width).to(dtype)
        self.keys, self.values = (torch.randn(rows, heads.keys, CAPACITY, heads.size).to(dtype) for _ in range(2))
        angles = torch.rand(CAPACITY, self.case.rotated // 2) * 6
        tables = (torch.cat((part, part), dim=1).to(dtype).float() for part in (angles.cos(), angles.sin()))
        self.rope = (next(tables), next(tables)) if self.case.rotated else None
        factors = [1 + torch.rand(heads.size) for _ in range(2)]
        self.norms = (
            (Norm(factors[0], 1e-5, False, False), Norm(factors[1], 1e-5, False, False)) if self.case.norms else None
        )
        self.sinks = torch.randn(heads.queries) if self.case.sinks else None

    def attend(self, at: Tokens, qkv: Tensor, keys: Tensor, values: Tensor, split: int = 32) -> Tensor:
        """With splits of fewer positions than usual, so that short rows have several."""
        norms = self.norms or (None, None)
        oldest = (at.rotations - self.case.window + 1).clamp(min=0) if self.case.window else None
        sight = Sight(at.rotations, oldest)
        return attend(qkv, self.case.heads, keys, values, at, sight, self.rope, *norms, self.sinks, split)

    def expected(self, at: Tokens, seen: Tensor) -> Tensor:
        return _expected(self.case, self.qkv, self.keys, self.values, at, seen, self.rope, self.norms, self.sinks)


TREE = [-1, -1, 0, 2, 1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CASES), ("grouped", torch.float16), ("sinks and norms", torch.float16)],
)
def test_each_node_sees_its_path(name: str, dtype: torch.dtype) -> None:
    lengths = [37, 3]
    at, seen = _tokens(lengths, TREE)
    setting = Setting(name, 2, 12, dtype)
    expected = setting.expected(at, seen)
    found = setting.attend(at, setting.qkv, setting.keys.clone(), setting.values.clone())
    assert (found.double() - expected).abs().max() <= CLOSE[dtype] * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_path_has_the_bits_of_the_same_tokens_decoded_alone(name: str) -> None:
    """Also across the border of a split, and as a sequence; other rows, and their lengths, change nothing."""
    lengths = [30, 3]
    at, seen = _tokens(lengths, TREE)
    setting = Setting(name, 2, 12)
    keys, values = setting.keys.clone(), setting.values.clone()
    found = setting.attend(at, setting.qkv, keys, values)
    path = [0, 1, 3, 4]  # the columns of a leaf and those before it
    assert seen[0, 4].nonzero().flatten().tolist() == path
    keys, values = setting.keys[:1].clone(), setting.values[:1].clone()
    for step, column in enumerate(path):
        alone, _ = _tokens([30 + step], [])
        assert setting.attend(alone, setting.qkv[column : column + 1], keys, values).equal(found[column : column + 1])
    keys, values = setting.keys[:1].clone(), setting.values[:1].clone()
    sequence, _ = _tokens([30], [-1, 0, 1], sequence=True)
    assert setting.attend(sequence, setting.qkv[path], keys, values).equal(found[path])


def test_ragged_rows_have_the_bits_of_padded_ones() -> None:
    setting = Setting("grouped", 2, 12)
    at, _ = _tokens([30, 3], TREE)
    padded = setting.attend(at, setting.qkv, setting.keys.clone(), setting.values.clone())
    present = torch.tensor([[True] * 6, [True, False, True, False, False, False]])
    layout = RaggedLayout.of(present, 8)
    ragged, _ = _tokens([30, 3], TREE, layout)
    real = layout.cell_index
    found = setting.attend(ragged, setting.qkv[real], setting.keys.clone(), setting.values.clone())
    assert found.equal(padded[real])
