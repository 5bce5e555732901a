"""Static trees: shapes, presets, and which token ends up in which node."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from eyas.errors import UsageError
from eyas.tree import DraftTree, TreeSpec, parse_tree
from eyas.tree.spec import PRESETS
from eyas.tree.static import Path, StaticTree

CPU = torch.device("cpu")


def token(path: Path) -> int:
    """A token id that encodes the whole path."""
    number = 1
    for rank in path:
        number = number * 10 + rank
    return number


def logp(row: int, path: Path) -> float:
    """The made-up log-probability of one step."""
    return -(1.0 + path[-1]) * 2.0 ** -len(path) - row


def grow(spec: TreeSpec, batch: int) -> tuple[DraftTree, list[list[Path]]]:
    """Feed a growth with children that carry their path; returns the tree and its frontiers."""
    growth = spec.start(batch, CPU)
    frontier: list[Path] = [()]
    frontiers = []
    while True:
        children = [[(*p, rank) for rank in range(growth.fanout)] for p in frontier]
        tokens = torch.tensor([[[token(c) for c in group] for group in children]] * batch)
        scores: Tensor = torch.tensor([[[logp(r, c) for c in g] for g in children] for r in range(batch)])
        grown = growth.expand(scores, tokens)
        if grown is None:
            return growth.tree(), frontiers
        by_token = {token(c): c for group in children for c in group}
        for row in range(batch):
            paths = [by_token[t] for t in grown.tokens[row].tolist()]
            assert [frontier[i] for i in grown.parents[row].tolist()] == [p[:-1] for p in paths]
        frontier = paths
        frontiers.append(paths)


@pytest.mark.parametrize("name", ["chain:5", "static:eagle1", "static:slim", "static:mc_sim_7b_63"])
def test_every_node_holds_its_own_path(name: str) -> None:
    spec = parse_tree(name)
    assert isinstance(spec, StaticTree)
    tree, frontiers = grow(spec, batch=2)
    assert tree.tokens.tolist() == [[token(p) for p in spec.nodes]] * 2
    assert tree.valid.all()
    assert tree.max_depth == spec.depth == max(map(len, spec.nodes))
    for row in range(2):
        for node, path in enumerate(spec.nodes):
            parent = int(tree.parents[row, node])
            assert (spec.nodes[parent] if parent >= 0 else ()) == path[:-1]
            assert parent < node
            expected = sum(logp(row, path[:i]) for i in range(1, len(path) + 1))
            assert float(tree.logprob[row, node]) == pytest.approx(expected)
            assert int(tree.depth[row, node + 1]) == len(path)
    # only nodes with children are run through the drafter, and all of them
    assert sorted(p for f in frontiers for p in f) == sorted({p[:-1] for p in spec.nodes if len(p) > 1})


@pytest.mark.parametrize("name", ["chain:5", "static:eagle1", "static:slim"])
def test_the_shared_mask_is_that_of_the_parents(name: str) -> None:
    tree, _ = grow(parse_tree(name), batch=2)
    plain = DraftTree(tree.tokens, tree.parents, tree.logprob, tree.valid, tree.max_depth)
    assert torch.equal(tree.ancestors, plain.ancestors)


def test_presets() -> None:
    sizes = {name: len(paths) for name, paths in PRESETS.items()}
    assert sizes == {"eagle1": 25, "mc_sim_7b_63": 63, "slim": 15}
    assert all(len(set(paths)) == len(paths) for paths in PRESETS.values())
    by_depth = [sum(len(p) == d for p in PRESETS["eagle1"]) for d in range(1, 6)]
    assert by_depth == [4, 8, 8, 3, 2]


def test_a_chain_is_the_one_path_tree() -> None:
    chain = StaticTree.chain(4)
    assert chain.nodes == StaticTree([(0,) * d for d in range(1, 5)]).nodes
    assert (chain.parents, chain.depth, chain.max_fanout) == ((-1, 0, 1, 2), 4, 1)
    tree, _ = grow(chain, batch=1)
    assert tree.tokens.tolist() == [[10, 100, 1000, 10000]]


def test_the_order_of_paths_does_not_matter() -> None:
    paths = PRESETS["slim"]
    assert StaticTree(paths[::-1]).nodes == StaticTree([*paths, *paths]).nodes == StaticTree(paths).nodes
    assert all((len(a), a) < (len(b), b) for a, b in pairwise(StaticTree(paths).nodes))


def test_fanout_is_what_each_level_needs() -> None:
    spec = StaticTree([(0,), (2,), (0, 1), (2, 0)])
    assert spec.max_fanout == 3
    growth = spec.start(1, CPU)
    assert growth.fanout == 3
    growth.expand(torch.zeros(1, 1, 3), torch.arange(3).view(1, 1, 3))
    assert growth.fanout == 2


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        ([], "at least one path"),
        ([()], "no path may be empty"),
        ([(0,), (1, 0)], r"no parent \(1,\)"),
        ([(-1,)], "negative"),
    ],
)
def test_impossible_trees_are_refused(paths: list[Path], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        StaticTree(paths)


def test_a_chain_has_a_length() -> None:
    with pytest.raises(UsageError, match="length must be at least 1"):
        StaticTree.chain(0)
