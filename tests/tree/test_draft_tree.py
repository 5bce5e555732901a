"""Draft trees against walking up the parents in Python."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.tree import DraftTree, NodeLogits, parse_tree
from eyas.tree.draft_tree import ancestor_mask


@st.composite
def parent_lists(draw: st.DrawFn) -> list[list[int]]:
    """Parents of up to 3 trees of one size; deep chains are likely."""
    rows = draw(st.integers(1, 3))
    nodes = draw(st.integers(0, 12))
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


@given(parent_lists(), st.booleans())
def test_trees_come_to_the_host_in_one_copy(parents: list[list[int]], more: bool) -> None:
    tree = tree_of(parents)
    tree = replace(tree, logprob=-torch.rand(tree.tokens.shape), valid=tree.tokens % 3 > 0)
    if more:
        tree = replace(tree, scratch=tree.tokens % 2 > 0, sources=tree.tokens % 4)
    found = tree.unpacked(tree.packed())
    for name in ("tokens", "parents", "logprob", "valid", "scratch", "sources"):
        expected, part = getattr(tree, name), getattr(found, name)
        assert part is None if expected is None else part.equal(expected), name
    assert found.ancestors.equal(tree.ancestors)


def valid_paths(tree: DraftTree, row: int) -> list[tuple[list[int], float]]:
    """Tokens from the root and value of every valid node, in order."""
    parents = tree.parents[row].tolist()
    return [
        ([int(tree.tokens[row, column - 1]) for column in path(parents, node + 1)[:-1]], float(tree.logprob[row, node]))
        for node in range(tree.size)
        if tree.valid[row, node]
    ]


@given(parent_lists(), st.integers(0, 2**16))
def test_a_compact_tree_has_the_same_nodes_in_as_few_columns_as_can_be(parents: list[list[int]], seed: int) -> None:
    tree = tree_of(parents)
    draw = torch.Generator().manual_seed(seed)
    valid = torch.rand(tree.valid.shape, generator=draw) < 0.7
    for node in range(tree.size):  # no valid node below an invalid one
        above = torch.tensor([row[node] for row in parents]).unsqueeze(1)
        valid[:, node] &= (above < 0)[:, 0] | valid.gather(1, above.clamp(min=0))[:, 0]
    tokens = torch.randint(99, valid.shape, generator=draw)
    tree = replace(tree, valid=valid, tokens=tokens, logprob=torch.rand(valid.shape, generator=draw))
    small = tree.compact()
    assert small.size == max(valid.sum(1).tolist())
    assert small.counted in (None, int(valid.sum()))
    for row in range(len(parents)):
        assert valid_paths(small, row) == valid_paths(tree, row)
        assert all(parent < node for node, parent in enumerate(small.parents[row].tolist()))
    deepest = (small.depth[:, 1:] * small.valid).flatten().tolist()
    assert small.max_depth >= max(deepest, default=0)


def test_a_compact_tree_with_a_shared_shape_makes_its_own() -> None:
    tree = parse_tree("chain:3").start(1, torch.device("cpu"))
    for _ in range(3):
        tree.expand(torch.zeros(1, 1, 1), torch.full((1, 1, 1), 5))
    cut = replace(tree.tree(), valid=torch.tensor([[True, True, False]]), counted=None).compact()
    assert cut.ancestors.tolist() == [torch.ones(3, 3).tril().bool().tolist()]


def test_rows_that_are_not_drafting_have_no_nodes() -> None:
    tree = tree_of([[-1, 0], [-1, -1], [-1, 0]])
    assert tree.only(None) is tree.only([True] * 3) is tree
    some = replace(tree, counted=6).only([True, False, True])
    assert some.valid.tolist() == [[True, True], [False, False], [True, True]]
    assert some.counted == 4
    assert replace(tree, valid=tree.valid & (tree.parents < 0)).only([True, False, True]).counted is None


def test_logits_are_found_by_node_index() -> None:
    rows = torch.randn(4, 7)
    logits = NodeLogits(rows, torch.tensor([[0, 1, 2], [3, 3, 3]]))
    assert logits.vocab_size == 7
    assert torch.equal(logits.best(), rows.argmax(1)[logits.index])
    assert torch.equal(logits.at(torch.tensor([1, 0])), rows[[1, 3]])
    assert torch.equal(logits.at(torch.tensor([3, 3])), rows[[2, 3]])  # off the tree: any
    padded = torch.randn(2, 3, 7)
    whole = NodeLogits.of(padded)
    assert whole.rows.data_ptr() == padded.data_ptr()
    assert torch.equal(whole.at(torch.tensor([2, 1])), padded[[0, 1], [2, 1]])
