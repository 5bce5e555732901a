"""Proposals as draft trees: a tree of any shape holds what was proposed within its limits, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.tree import DraftTree, TreeSpec, parse_tree
from eyas.tree import proposal as proposal_module
from eyas.tree.dynamic import DynamicTree
from eyas.tree.proposal import Proposal, grow
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import BINS, ValueTable

CPU = torch.device("cpu")


def paths(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """The paths of tokens from the root to every valid node of a row."""
    found: list[tuple[int, ...]] = []
    for token, parent, valid in zip(
        tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.valid[row], strict=True
    ):
        found.append(((*found[parent], token) if parent >= 0 else (token,)) if valid else ())
    return {path for path in found if path}


def proposed(proposal: Proposal) -> dict[tuple[int, ...], float]:
    """Every path of a proposal, and its log-probability."""
    found: list[tuple[tuple[int, ...], float]] = []
    for token, parent, logprob in zip(proposal.tokens, proposal.parents, proposal.logprobs, strict=True):
        above, total = found[parent] if parent >= 0 else ((), 0.0)
        found.append(((*above, token), total + logprob))
    return dict(found)


STEPS = st.floats(-1.0, -0.01)


@st.composite
def proposals(draw: st.DrawFn, steps: st.SearchStrategy[float] = STEPS) -> Proposal:
    made = Proposal()
    for node in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, node - 1))
        taken = {token for token, at in zip(made.tokens, made.parents, strict=True) if at == parent}
        above = [logprob for logprob, at in zip(made.logprobs, made.parents, strict=True) if at == parent]
        made.tokens.append(draw(st.sampled_from(sorted(set(range(30)) - taken))))
        made.parents.append(parent)
        made.logprobs.append(min(above, default=0.0) + draw(steps))
    return made


@given(st.lists(proposals(), min_size=1, max_size=3))
def test_a_large_tree_holds_all_that_was_proposed(rows: list[Proposal]) -> None:
    for text in ("dynamic:12,12,60", "shared:12,12,200"):
        tree = grow(parse_tree(text), rows, CPU)
        for row, proposal in enumerate(rows):
            assert paths(tree, row) == set(proposed(proposal)), text


@given(proposals(), st.integers(1, 5))
def test_a_chain_is_the_path_of_best_children(proposal: Proposal, depth: int) -> None:
    best = [path for path in proposed(proposal) if len(path) <= depth and _is_first(path, proposal)]
    assert paths(grow(parse_tree(f"chain:{depth}"), [proposal], CPU), 0) == set(best)


def _is_first(path: tuple[int, ...], proposal: Proposal) -> bool:
    """Whether every node of a path is the best child of its parent."""
    node = -1
    for token in path:
        children = proposal.children()[node + 1]
        if proposal.tokens[children[0]] != token:
            return False
        node = children[0]
    return True


@pytest.mark.parametrize("text", ["dynamic:3,2,4", "static:slim", "shared:3,2,4", "chain:2"])
@given(rows=st.lists(proposals(), min_size=1, max_size=3))
def test_a_small_tree_holds_nothing_else(text: str, rows: list[Proposal]) -> None:
    tree = grow(parse_tree(text), rows, CPU)
    counted = 0
    for row, proposal in enumerate(rows):
        found = paths(tree, row)
        known = proposed(proposal)
        assert found <= set(known)
        assert all(path[:-1] in found for path in found if len(path) > 1)
        counted += len(found)
    assert counted == int(tree.valid.sum())


def test_values_are_those_proposed() -> None:
    proposal = Proposal([5, 6, 7], [-1, 0, -1], [math.log(0.5), math.log(0.8), math.log(0.25)])
    tree = grow(parse_tree("dynamic:2,2,3"), [proposal, Proposal()], CPU)
    assert {round(math.exp(value), 3) for value in tree.logprob[0][tree.valid[0]].tolist()} == {0.5, 0.4, 0.25}
    assert not tree.valid[1].any()


SIXTY_FOURTHS = st.integers(-200, -1).map(lambda n: n / 64)  # whose sums are exact
TABLE = ValueTable(np.stack([np.linspace(0.9, 0.1, BINS), np.linspace(0.7, 0.05, BINS)])[None])


@pytest.mark.every(2)
@given(st.lists(proposals(SIXTY_FOURTHS), min_size=1, max_size=3).filter(lambda rows: any(row.tokens for row in rows)))
@pytest.mark.parametrize(
    "spec",
    [
        DynamicTree(4, 12, 5),
        DynamicTree(12, 12, 60),
        DynamicTree(4, 12, 9, threshold=0.2),
        SharedTree(4, 12, 7),
        SharedTree(12, 12, 60, per_row=5),
        PlannedTree(SharedTree(6, 12, 7, per_row=4, threshold=0.1), values=TABLE),
        PlannedTree(SharedTree(6, 12, 9, threshold=0.01), values=TABLE, prices=tuple(0.15 * n for n in range(1, 10))),
    ],
    ids=("dynamic", "wide", "threshold", "shared", "per row", "values", "prices"),
)
def test_candidates_grown_at_once_are_those_of_every_level(spec: TreeSpec, rows: list[Proposal]) -> None:
    levels = [row.levels(spec.depth) for row in rows]
    assert max(len(nodes) for row in levels for nodes in row) <= spec.beam
    slow = proposal_module._grown(spec, rows)
    fast = proposal_module._grown_at_once(spec, rows, levels)
    for tree in (fast, grow(spec, rows, CPU)):
        for row, proposal in enumerate(rows):
            known = proposed(proposal)
            assert paths(tree, row) <= known.keys()
            found = sorted(tree.logprob[row][tree.valid[row]].tolist())
            assert found == pytest.approx(sorted(known[path] for path in paths(tree, row)))
            if spec.values is None:  # among equals either may be kept
                assert found == pytest.approx(sorted(slow.logprob[row][slow.valid[row]].tolist()))
        assert int(tree.valid.sum()) == int(slow.valid.sum())
        assert tree.max_depth >= int(tree.depth.max())
