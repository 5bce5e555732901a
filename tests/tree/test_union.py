"""Trees of two sources: all that a united tree holds was in one of the two, once, and the best of it is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from eyas.tree import DraftTree, TreeSpec, parse_tree, union
from eyas.tree.acceptance import GROUPS
from eyas.tree.draft_tree import Proposal, Source
from eyas.tree.proposal import found_tree, grow
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.union import expected_levels, path_values, unite
from eyas.tree.values import BINS, ValueTable

from .test_proposal import CPU, paths, proposals, proposed

SPECS = ["chain:3", "static:slim", "dynamic:3,3,5", "dynamic:3,3,8,0.2", "shared:3,3,9", "shared:4,3,20,4"]
Path = tuple[int, ...]


class Pair(NamedTuple):
    """What a network would draft and what was found, in the same rows."""

    network: list[Proposal]
    found: list[Proposal]

    def trees(self, spec: TreeSpec) -> tuple[DraftTree, DraftTree]:
        network = grow(spec, self.network, CPU)
        found = found_tree(self.found, spec.max_fanout == 1)
        return network, found

    @property
    def groups(self) -> Tensor:
        return torch.zeros(len(self.found), dtype=torch.int64)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    rows = draw(st.integers(1, 3))
    made = Pair([draw(proposals()) for _ in range(rows)], [draw(proposals()) for _ in range(rows)])
    for row in range(rows):
        if draw(st.booleans()):  # both go the same way for a while
            steps = draw(st.integers(1, 4))
            copied = [*_best(made.network[row])[:steps], 31, 32]
            made.found[row] = Proposal.chain(copied, [-0.1] * len(copied))
    return made


def _best(proposal: Proposal) -> list[int]:
    node = -1
    found = []
    children = proposal.children()
    while children[node + 1]:
        node = children[node + 1][0]
        found.append(proposal.tokens[node])
    return found


def sources(tree: DraftTree, row: int) -> dict[Path, int]:
    """Where each path comes from, in the order of the nodes; parents come first and no sibling is there twice."""
    assert tree.sources is not None
    found: list[Path] = []
    known: dict[Path, int] = {}
    nodes = zip(*(part[row].tolist() for part in (tree.tokens, tree.parents, tree.valid, tree.sources)), strict=True)
    for node, (token, parent, valid, source) in enumerate(nodes):
        assert -1 <= parent < node
        path = (*found[parent], token) if parent >= 0 else (token,)
        found.append(path)
        if valid:
            assert path not in known
            assert len(path) == 1 or path[:-1] in known
            known[path] = source
    return known


@given(pair=pairs(), seed=st.integers(0, 99))
def test_a_host_unites_trees_as_a_device_does(pair: Pair, seed: int) -> None:
    values = ValueTable(np.random.default_rng(seed).random((len(Source) * GROUPS, 2, BINS)))
    network, found = pair.trees(parse_tree("dynamic:3,3,8"))
    if not network.size or not found.size:
        return
    there = union._merged(network, found)
    rows = union._Rows.of(network, found)
    assert rows.valid == there.valid.tolist()
    here = rows.tree([[True] * there.size] * len(pair.found), there.max_depth)
    for name in ("tokens", "parents", "sources"):
        assert torch.equal(getattr(here, name), getattr(there, name)), name
    torch.testing.assert_close(here.logprob[there.valid], there.logprob[there.valid])
    root = union._steps(there).neg().clamp(min=0.0).sqrt() * 10.0  # PyTorch's root may be rounded to the other bin
    assume(not ((root.round() >= 1.0) & ((root - root.round()).abs() < 1e-3)).any())
    for table in (None, values):
        scores = union._path_values(there, table, pair.groups)
        assert rows.better_chains(scores.tolist()) == union._better_chain(there, scores).tolist()
        torch.testing.assert_close(union.path_values(there, table, pair.groups), scores)


PRICED = PlannedTree(SharedTree(3, 3, 6, 4), prices=(0.1, 0.3, 0.4, 0.5, 0.6, 2.0), padding_prices=(0.1, 0.2))


@pytest.mark.parametrize("spec", [*map(parse_tree, SPECS), PRICED, replace(PRICED, prices=None, padding_prices=None)])
@given(rows=st.integers(1, 3), seed=st.integers(0, 999))
def test_a_host_keeps_the_nodes_that_a_device_keeps(spec: TreeSpec, rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = np.log(random.choice([0.05, 0.1, 0.3, 0.5, 0.8], (rows, 12))).astype(np.float32)  # many are equal
    allowed = random.random((rows, 12)) < 0.8
    kept = spec.keep(torch.from_numpy(scores), torch.from_numpy(allowed))
    assert spec.keep_on_host(scores.tolist(), allowed.tolist()) == kept.tolist()


@pytest.mark.every(2)
@pytest.mark.parametrize("text", SPECS)
@given(pair=pairs())
def test_a_union_holds_what_either_has_and_nothing_else(text: str, pair: Pair) -> None:
    if not any(proposal.tokens for proposal in pair.found):
        return
    spec = parse_tree(text)
    network, found = pair.trees(spec)
    tree = unite(spec, network, found, None, pair.groups)
    assert int(tree.valid.sum()) == tree.counted
    for row in range(len(pair.found)):
        drafted = paths(network, row) if network.size else set()
        copied = paths(found, row)
        parents = {path[:-1] for path in drafted}
        alone = copied - drafted
        disputed = {path for path in alone if path[:-1] in parents}
        whose = {
            Source.NETWORK: drafted - copied,
            Source.LOOKUP: alone - disputed,
            Source.BOTH: drafted & copied,
            Source.DISPUTED: disputed,
        }
        united = sources(tree, row)
        assert all(path in whose[Source(source)] for path, source in united.items())
        assert len(united) <= spec.max_nodes
        assert max(map(len, united), default=0) <= tree.max_depth
        if spec.max_fanout == 1:
            assert len(united) == max(map(len, united), default=0)
    if isinstance(spec, SharedTree):
        assert int(tree.valid.sum()) <= spec.budget


@given(pairs())
def test_a_large_union_holds_all_and_the_surer_probability(pair: Pair) -> None:
    if not any(proposal.tokens for proposal in pair.found):
        return
    spec = parse_tree("dynamic:12,12,60")
    network, found = pair.trees(spec)
    tree = unite(spec, network, found, None, pair.groups)
    for row, (drafted, copied) in enumerate(zip(pair.network, pair.found, strict=True)):
        steps: dict[Path, float] = {}
        for proposal in (drafted, copied):
            totals = proposed(proposal)
            for path, total in totals.items():
                step = total - totals.get(path[:-1], 0.0)
                steps[path] = max(steps.get(path, -math.inf), step)
        assert set(sources(tree, row)) == set(steps)
        kept = [node for node, valid in enumerate(tree.valid[row].tolist()) if valid]
        for node, path in zip(kept, sources(tree, row), strict=True):
            total = sum(steps[path[: depth + 1]] for depth in range(len(path)))
            assert tree.logprob[row, node].item() == pytest.approx(total, abs=1e-4)


def table(network: float, lookup: float, both: float) -> ValueTable:
    """Steps of these sources are worth these, whatever their probability; disputed copies what others are."""
    values = np.zeros((GROUPS * len(Source), 2, BINS))
    for source, value in (
        (Source.NETWORK, network),
        (Source.LOOKUP, lookup),
        (Source.DISPUTED, lookup),
        (Source.BOTH, both),
    ):
        values[source * GROUPS : (source + 1) * GROUPS] = value
    return ValueTable(values)


DRAFTED = Proposal.chain([1, 2, 3], [math.log(0.9)] * 3)
COPIED = Proposal.chain([1, 7, 8, 9], [math.log(0.5)] * 4)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        (None, {(1,), (1, 2), (1, 2, 3)}),
        (table(0.2, 0.9, 0.95), {(1,), (1, 7), (1, 7, 8)}),
        (table(0.9, 0.2, 0.95), {(1,), (1, 2), (1, 2, 3)}),
    ],
)
@pytest.mark.parametrize("text", ["dynamic:3,2,3", "shared:3,2,3", "chain:3"])
def test_what_nodes_were_worth_decides(text: str, values: ValueTable | None, kept: set[Path]) -> None:
    spec = parse_tree(text)
    pair = Pair([DRAFTED], [COPIED])
    tree = unite(spec, *pair.trees(spec), values, pair.groups)
    assert set(sources(tree, 0)) == kept
    assert not tree.lookup.alone


def test_impossible_guesses_leave_the_copies() -> None:
    spec = PlannedTree(SharedTree(3, 2, 7), prices=(0.1, 0.2, 0.3, 0.4, 4.0, 8.0, 12.0), values=table(0.5, 0.9, 0.9))
    network, found = Pair([DRAFTED], [COPIED]).trees(parse_tree("dynamic:3,2,3"))
    network = replace(network, logprob=torch.tensor([[-0.1, -math.inf, -math.inf]]))
    tree = unite(spec, network, found, spec.values, torch.zeros(1, dtype=torch.int64))
    assert {(1,), (1, 7), (1, 7, 8), (1, 7, 8, 9)} <= set(sources(tree, 0))


def test_prices_choose_among_all_nodes() -> None:
    spec = PlannedTree(SharedTree(3, 2, 7), prices=(0.1, 0.2, 0.3, 0.4, 4.0, 8.0, 12.0), values=table(0.5, 0.9, 0.9))
    pair = Pair([DRAFTED], [COPIED])
    tree = unite(spec, *pair.trees(parse_tree("dynamic:3,2,3")), spec.values, pair.groups)
    assert set(sources(tree, 0)) == {(1,), (1, 7), (1, 7, 8), (1, 7, 8, 9)}


@pytest.mark.parametrize(
    ("calibration", "kept"), [(1.0, {(1,), (1, 2)}), (0.3, {(1,)}), (3.0, {(1,), (1, 2), (1, 2, 3)})]
)
def test_a_text_s_calibration_counts_for_guesses_but_not_for_copies(calibration: float, kept: set[Path]) -> None:
    """A copy beside them is kept whatever the network's guesses are worth in this text."""
    spec = PlannedTree(
        SharedTree(3, 2, 7),
        prices=tuple(0.35 * n for n in range(1, 8)),
        values=table(0.5, 0.9, 0.9),
        calibrations=(calibration,),
    )
    pair = Pair([DRAFTED], [COPIED])
    tree = unite(spec, *pair.trees(parse_tree("dynamic:3,2,3")), spec.values, pair.groups)
    copies = {(1, 7), (1, 7, 8), (1, 7, 8, 9)}
    assert set(sources(tree, 0)) == kept | copies
    assert tree.network.promise is not None
    second = min(0.45, 0.9 / calibration)  # no node is worth more than its parent
    known = {(1,): 0.9, (1, 2): second, (1, 2, 3): second / 2}
    assert tree.network.promise[0] == pytest.approx(sum(known[path] for path in kept), rel=0.01)


def test_a_row_that_drafts_nothing_stays_empty_and_a_found_one_needs_no_network() -> None:
    spec = PlannedTree(SharedTree(1, 2, 6), found_only=True)
    tree = grow(spec, [COPIED, Proposal()], CPU)
    assert set(sources(tree, 0)) == {(1,), (1, 7), (1, 7, 8), (1, 7, 8, 9)}  # longer than the network's levels
    assert not tree.valid[1].any()
    assert tree.lookup.alone
    assert grow(spec, [Proposal(), Proposal()], CPU).lookup.alone


def test_values_multiply_along_paths_and_never_rise() -> None:
    tree = found_tree([Proposal([5, 6, 7], [-1, 0, -1], [0.0, 0.0, -1.0])], chains=False)
    values = path_values(tree, None, torch.zeros(1, dtype=torch.int64))[0]
    assert values[1] < values[0] < 0.0  # certain steps as well: a child is never kept without its parent
    assert values[2].item() == pytest.approx(-1.0)
    later = path_values(tree, table(0.5, 0.5, 0.5), torch.zeros(1, dtype=torch.int64))[0].exp()
    torch.testing.assert_close(later, torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64), atol=1e-3, rtol=0)


def test_found_tokens_are_expected_by_what_found_ones_were_worth() -> None:
    branching = Proposal([5, 6, 7, 8], [-1, 0, 1, -1], [-0.1] * 4)
    found = found_tree([branching, Proposal()], False)
    values = table(0.9, 0.5, 0.9)
    groups = torch.zeros(2, dtype=torch.int64)
    first, empty = expected_levels(found, values, groups)
    assert first == pytest.approx([min(1.0, 0.5 + float(values.values[2, 1].max())), 0.25, 0.125], rel=1e-3)
    assert not any(empty)
    squared, _ = expected_levels(found, values, groups, (2.0, 1.0))
    assert squared[1:] == pytest.approx([0.25**2, 0.125**2], rel=1e-3)
