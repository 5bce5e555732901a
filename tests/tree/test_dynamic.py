"""Dynamic trees against EAGLE-2 written in plain Python, ties and zeros included."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import UsageError
from eyas.tree import DraftTree, parse_tree
from eyas.tree.dynamic import DynamicTree

CPU = torch.device("cpu")


class Node(NamedTuple):
    """A candidate: its cumulative score, parent (index into all candidates, -1 = root) and token."""

    score: float
    parent: int
    token: int


Scores = dict[int, list[float]]
"""Per parent token: the log-probabilities of its children, best first."""


def child(parent_token: int, rank: int, top_k: int) -> int:
    """A token id that names parent and rank."""
    return parent_token * (top_k + 1) + rank + 1


def oracle(spec: DynamicTree, steps: Scores) -> list[Node]:
    """Every candidate of EAGLE-2's beam, in level order."""
    made: list[Node] = []
    beam = [(-1, 0, 0.0)]  # (index, token, score)
    for _ in range(spec.depth):
        first = len(made)
        for index, token, score in beam:
            for rank in range(spec.top_k):
                total = score + min(0.0, steps[token][rank])
                made.append(Node(float(torch.tensor(total)), index, child(token, rank, spec.top_k)))
        level = sorted(range(first, len(made)), key=lambda i: -made[i].score)[: spec.top_k]
        beam = [(i, made[i].token, made[i].score) for i in level]
    return made


def grow(spec: DynamicTree, rows: list[Scores]) -> DraftTree:
    growth = spec.start(len(rows), CPU)
    frontier = torch.zeros(len(rows), 1, dtype=torch.int64)
    while True:
        scores = [[steps[t][: growth.fanout] for t in ids] for steps, ids in zip(rows, frontier.tolist(), strict=True)]
        tokens = [[[child(t, r, spec.top_k) for r in range(growth.fanout)] for t in ids] for ids in frontier.tolist()]
        grown = growth.expand(torch.tensor(scores), torch.tensor(tokens))
        if grown is None:
            return growth.tree()
        named = frontier.gather(1, grown.parents)  # the frontier's parents are named rightly
        assert torch.equal((grown.tokens - 1) // (spec.top_k + 1), named)
        frontier = grown.tokens


class Lazy(dict[int, list[float]]):
    """Random scores of a token's children, drawn on first use and the same for the same seed."""

    def __init__(self, seed: int, top_k: int, grid: tuple[float, ...] | None) -> None:
        super().__init__()
        self.seed = seed
        self.top_k = top_k
        self.grid = grid

    def __missing__(self, token: int) -> list[float]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + token)
        if self.grid is None:
            values = torch.randn(self.top_k + 2, generator=draw).mul(2).log_softmax(0)[: self.top_k]
        else:
            values = torch.tensor(self.grid)[torch.randint(len(self.grid), (self.top_k,), generator=draw)]
        self[token] = values.sort(descending=True).values.tolist()
        return self[token]


specs = st.builds(DynamicTree, st.integers(1, 4), st.integers(1, 4), st.integers(1, 20))


@given(specs, st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=80)
def test_it_is_eagle2(spec: DynamicTree, seed: int, batch: int) -> None:
    """With distinct scores the tree is unique: the same nodes, parents and scores."""
    rows: list[Scores] = [Lazy(seed + row, spec.top_k, None) for row in range(batch)]
    tree = grow(spec, rows)
    check_shape(spec, tree)
    for row, steps in enumerate(rows):
        made = oracle(spec, steps)
        best = sorted(sorted(range(len(made)), key=lambda i: -made[i].score)[: spec.nodes])
        column = {-1: -1, **{index: at for at, index in enumerate(best)}}
        assert tree.tokens[row].tolist() == [made[i].token for i in best]
        assert tree.parents[row].tolist() == [column[made[i].parent] for i in best]
        torch.testing.assert_close(tree.logprob[row], torch.tensor([made[i].score for i in best]))


@given(
    specs,
    st.integers(0, 10_000),
    st.sampled_from([(0.0,), (-1.0,), (0.0, -1.0), (0.0, 1e-7), (-math.inf, 0.0)]),
)
@settings(max_examples=120)
def test_ties_never_part_a_child_from_its_parent(spec: DynamicTree, seed: int, grid: tuple[float, ...]) -> None:
    """All equal, exactly zero (p = 1), a hair above zero by rounding, impossible: the tree stays a tree."""
    tree = grow(spec, [Lazy(seed, spec.top_k, grid)])
    check_shape(spec, tree)
    # a node's token names its parent's token: the parent kept is the parent drafted from
    for node in range(tree.size):
        parent = int(tree.parents[0, node])
        named = (int(tree.tokens[0, node]) - 1) // (spec.top_k + 1)
        assert (int(tree.tokens[0, parent]) if parent >= 0 else 0) == named
    assert len(set(tree.tokens[0].tolist())) == tree.size


def check_shape(spec: DynamicTree, tree: DraftTree) -> None:
    """Parents first, no deeper than promised, as many nodes as there are candidates for."""
    candidates, width = 0, 1
    for _ in range(spec.depth):
        candidates += width * spec.top_k
        width = min(spec.top_k, width * spec.top_k)
    assert tree.size == min(spec.nodes, candidates)
    assert (tree.parents < torch.arange(tree.size)).all()
    assert (tree.parents >= -1).all()
    assert int(tree.depth.max()) <= tree.max_depth <= spec.depth
    assert tree.valid.all()


THREE: Scores = {
    0: [math.log(0.6), math.log(0.3)],
    1: [math.log(0.5), math.log(0.1)],
    2: [math.log(0.9), math.log(0.05)],
}


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(0.0, [1, 2, 4, 5, 7, 8]), (0.05, [1, 2, 4, 5, 7]), (0.28, [1, 2, 4]), (0.31, [1]), (0.9, [])],
)
def test_the_threshold_prunes_improbable_paths_and_trims_the_width(threshold: float, kept: list[int]) -> None:
    """Path probabilities: 1: .6, 2: .3, below 1: 4 = .3, 5 = .06; below 2: 7 = .27, 8 = .015."""
    tree = grow(DynamicTree(2, 2, 6, threshold), [THREE])
    assert tree.tokens[0].tolist() == kept
    assert [t for t, ok in zip(tree.tokens[0].tolist(), tree.valid[0].tolist(), strict=True) if ok] == kept
    assert tree.max_depth <= tree.size


def test_rows_pruned_differently_share_the_widest_shape() -> None:
    sure: Scores = {0: [-0.01, -5.0], 1: [-0.01, -5.0], 2: [-0.01, -5.0]}
    unsure: Scores = {t: [-5.0, -6.0] for t in range(3)}
    tree = grow(DynamicTree(2, 2, 6, 0.5), [sure, unsure])
    assert tree.valid.tolist() == [[True, True], [False, False]]
    assert tree.tokens[0].tolist() == [1, 4]
    invalid_parents = ~tree.valid.gather(1, tree.parents.clamp(min=0)) & (tree.parents >= 0)
    assert not (tree.valid & invalid_parents).any()


@given(st.integers(0, 5000), st.floats(0.001, 0.9))
@settings(max_examples=40)
def test_a_valid_node_has_a_valid_parent(seed: int, threshold: float) -> None:
    spec = DynamicTree(3, 3, 12, threshold)
    tree = grow(spec, [Lazy(seed, 3, None), Lazy(seed + 1, 3, (0.0, -0.5))])
    for row in range(2):
        for node in range(tree.size):
            parent = int(tree.parents[row, node])
            if bool(tree.valid[row, node]) and parent >= 0:
                assert bool(tree.valid[row, parent])
            assert bool(tree.valid[row, node]) == (float(tree.logprob[row, node]) >= math.log(threshold))


@pytest.mark.parametrize("settings", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 1.0), (1, 1, 1, -0.1)])
def test_impossible_settings_are_refused(settings: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="dynamic tree: "):
        DynamicTree(*settings)  # type: ignore[arg-type]


def test_growing_costs_the_same_number_of_operations_for_any_width() -> None:
    """No Python per node: a tree of 4 and one of 400 take equally many tensor operations."""

    def operations(top_k: int, nodes: int) -> int:
        spec = parse_tree(f"dynamic:4,{top_k},{nodes}")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            growth = spec.start(2, CPU)
            width = 1
            while (
                grown := growth.expand(-torch.rand(2, width, top_k), torch.zeros(2, width, top_k).long())
            ) is not None:
                width = grown.tokens.shape[1]
            assert growth.tree().ancestors.shape == (2, 1 + nodes, 1 + nodes)
        return sum(event.count for event in profile.key_averages() if event.key in _COUNTED)

    assert operations(2, 6) == operations(12, 400)


_COUNTED = {
    "aten::gather",
    "aten::topk",
    "aten::cat",
    "aten::add",
    "aten::scatter_",
    "aten::bmm",
    "aten::index",
}
