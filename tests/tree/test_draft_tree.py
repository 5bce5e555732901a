"""The tree type against walking up the parents by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.tree import DraftTree
from eyas.tree.draft_tree import ancestor_mask


@st.composite
def parent_lists(draw: st.DrawFn) -> list[list[int]]:
    """Parents of up to 3 trees of one size; deep chains are likely."""
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 12))
    near = draw(st.booleans())
    return [[draw(st.integers(max(-1, i - 2) if near else -1, i - 1)) for i in range(nodes)] for _ in range(rows)]


def path(parents: list[int], column: int) -> list[int]:
    """The columns from `column` up to the root."""
    found = [column]
    while column:
        column = parents[column - 1] + 1
        found.append(column)
    return found


def tree_of(parents: list[list[int]], max_depth: int | None = None) -> DraftTree:
    index = torch.tensor(parents, dtype=torch.int64).view(len(parents), -1)
    deepest = max((len(path(row, i)) - 1 for row in parents for i in range(len(row) + 1)), default=0)
    flags = torch.ones(index.shape, dtype=torch.bool)
    return DraftTree(index + 50, index, torch.zeros(index.shape), flags, deepest if max_depth is None else max_depth)


@given(parent_lists(), st.integers(0, 4))
@settings(max_examples=80)
def test_ancestors_and_depth(parents: list[list[int]], slack: int) -> None:
    exact = tree_of(parents)
    tree = tree_of(parents, exact.max_depth + slack)
    assert tree.size == len(parents[0])
    for row, above in enumerate(parents):
        for column in range(1 + tree.size):
            up = path(above, column)
            assert tree.ancestors[row, column].nonzero().flatten().tolist() == sorted(up)
            assert int(tree.depth[row, column]) == len(up) - 1


def test_a_chain_of_every_length_is_covered() -> None:
    """Repeated squaring stops at the right power of two."""
    for length in range(1, 18):
        mask = ancestor_mask(torch.arange(-1, length - 1)[None], length)
        assert torch.equal(mask[0], torch.ones(1 + length, 1 + length).tril().bool())


def test_shared_ancestors_serve_every_row() -> None:
    tree = tree_of([[-1, 0, 0, 2], [-1, 0, 0, 2]])
    shared = DraftTree(tree.tokens, tree.parents, tree.logprob, tree.valid, 3, tree.ancestors[0])
    assert torch.equal(shared.ancestors, tree.ancestors)
    assert torch.equal(shared.depth, tree.depth)


def test_the_empty_tree_is_a_root() -> None:
    tree = DraftTree.empty(3, torch.device("cpu"))
    assert (tree.size, tree.max_depth) == (0, 0)
    assert tree.ancestors.tolist() == [[[True]]] * 3
    assert tree.depth.tolist() == [[0]] * 3
    assert tree.columns(torch.tensor([4, 5, 6])).tolist() == [[4], [5], [6]]


def test_columns_put_the_root_first() -> None:
    tree = tree_of([[-1, 0], [-1, -1]])
    assert tree.columns(torch.tensor([7, 8])).tolist() == [[7, 49, 50], [8, 49, 49]]
