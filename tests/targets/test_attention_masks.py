"""Masks against the definition, cell by cell."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.targets.attention import additive, visible
from eyas.tree.draft_tree import ancestor_mask


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int | None]:
    """(committed lengths, parents of each row's nodes, window)."""
    rows = draw(st.integers(1, 3))
    nodes = draw(st.integers(0, 7))
    parents = [[draw(st.integers(-1, i - 1)) for i in range(nodes)] for _ in range(rows)]
    lengths = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    return lengths, parents, draw(st.none() | st.integers(1, 8))


@given(passes())
@settings(max_examples=60)
def test_visible_is_the_definition(case: tuple[list[int], list[list[int]], int | None]) -> None:
    lengths, parents, window = case
    size = len(parents[0])
    start = max(lengths)
    index = torch.tensor(parents, dtype=torch.int64).view(len(parents), size)
    ancestors = ancestor_mask(index, size)
    positions = torch.tensor(lengths).unsqueeze(1) + ancestors.sum(-1) - 1
    got = visible(torch.tensor(lengths), start, ancestors, positions, window)
    assert got.shape == (len(lengths), 1, 1 + size, start + 1 + size)
    for row, length in enumerate(lengths):
        for query in range(1 + size):
            path = {query}
            node = query
            while node:
                node = parents[row][node - 1] + 1
                path.add(node)
            position = length + len(path) - 1
            for column in range(start + 1 + size):
                staged = column - length
                if staged < 0:
                    expected = True
                    at = column
                elif staged <= size:
                    expected = staged in path
                    at = length + _depth(parents[row], staged)
                else:
                    expected = False
                    at = column
                if window is not None:
                    expected = expected and position - at < window
                assert bool(got[row, 0, query, column]) == expected


def _depth(parents: list[int], node: int) -> int:
    depth = 0
    while node:
        node, depth = parents[node - 1] + 1, depth + 1
    return depth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_is_zero_or_the_lowest_number(dtype: torch.dtype) -> None:
    mask = additive(torch.tensor([[True, False]]), dtype)
    assert mask.dtype == dtype
    assert mask.tolist() == [[0.0, torch.finfo(dtype).min]]
    assert torch.isfinite(mask).all()
