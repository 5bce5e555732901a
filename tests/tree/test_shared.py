"""Shared trees against the same rule in plain Python: the best nodes of the whole batch, ties included."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from eyas.errors import UsageError
from eyas.tree import DraftTree, Growth, TreeSpec, parse_tree
from eyas.tree.shared import PlannedTree, SharedGrowth, SharedTree
from eyas.tree.values import BINS, ValueTable, bins, top_k_mask

CPU = torch.device("cpu")
GRIDS = [None, (0.0,), (-1.0,), (0.0, -1.0), (0.0, 1e-7), (-math.inf, 0.0)]


class Node(NamedTuple):
    """A candidate as the reference in plain Python finds it."""

    row: int
    at: int
    """Index among its row's candidates, level by level."""
    depth: int
    score: float
    worth: float
    """Logarithm of the value; without a table the score."""
    parent: int
    token: int


class Text:
    """Random log-probabilities of children, the same for the same seed; a token id encodes its whole path."""

    def __init__(self, seed: int, width: int, grid: tuple[float, ...] | None) -> None:
        self.seed = seed
        self.width = width
        self.grid = grid

    def children(self, token: int) -> list[float]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + token % 999_983)
        if self.grid is None:
            made = torch.randn(self.width + 2, generator=draw).mul(2).log_softmax(0)
        else:
            made = torch.tensor(self.grid)[torch.randint(len(self.grid), (self.width,), generator=draw)]
        return made.sort(descending=True).values[: self.width].tolist()

    def child(self, token: int, rank: int) -> int:
        return token * (self.width + 1) + rank + 1


def grow(
    spec: TreeSpec, rows: list[Text], drafting: list[bool] | None = None, growth: Growth | None = None
) -> DraftTree:
    growth = growth or spec.start(len(rows), CPU, drafting)
    frontier = torch.zeros(len(rows), 1, dtype=torch.int64)
    while True:
        scores = [[text.children(t) for t in ids] for text, ids in zip(rows, frontier.tolist(), strict=True)]
        tokens = [
            [[text.child(t, r) for r in range(spec.max_fanout)] for t in ids]
            for text, ids in zip(rows, frontier.tolist(), strict=True)
        ]
        grown = growth.expand(torch.tensor(scores), torch.tensor(tokens))
        if grown is None:
            return growth.tree()
        frontier = grown.tokens


def candidates(
    spec: SharedTree, rows: list[Text], table: ValueTable | None = None, groups: tuple[int, ...] = ()
) -> list[Node]:
    """Every candidate of every row's beam."""
    made = []
    for row, text in enumerate(rows):
        here: list[Node] = []
        beam = [Node(row, -1, 0, 0.0, 0.0, -1, 0)]
        for depth in range(1, spec.depth + 1):
            level = []
            for above in beam:
                steps = torch.tensor(text.children(above.token)).clamp(max=0.0)
                worths = steps
                if table is not None:
                    worths = table.look_up(steps.view(1, 1, -1), torch.tensor([groups[row]])).flatten()
                for rank, (step, worth) in enumerate(zip(steps, worths, strict=True)):
                    at = len(here) + len(level)
                    token = text.child(above.token, rank)
                    score = float(torch.tensor(above.score) + step)
                    value = float(torch.tensor(above.worth) + worth)
                    level.append(Node(row, at, depth, score, value, above.at, token))
            here += level
            beam = sorted(level, key=lambda node: -node.worth)[: spec.width]
        made += here
    return made


def tied(nodes: list[Node]) -> bool:
    """Whether nodes of one row are worth the same, but for rounding."""
    ranked = sorted(nodes, key=lambda node: (node.row, node.worth))
    return any(a.row == b.row and b.worth - a.worth < 1e-6 for a, b in pairwise(ranked))


def check(spec: SharedTree, tree: DraftTree, rows: int) -> None:
    """A tree of the promised shape: parents first and valid, within all limits."""
    assert tree.counted == int(tree.valid.sum()) <= spec.budget
    assert tree.size == int(tree.valid.sum(1).max())
    if spec.per_row is not None:
        assert tree.size <= spec.per_row
    assert tree.parents.shape == tree.tokens.shape == tree.valid.shape == (rows, tree.size)
    assert (tree.parents < torch.arange(tree.size)).all()
    assert (tree.parents >= -1).all()
    above = tree.valid.gather(1, tree.parents.clamp(min=0)) | (tree.parents < 0)
    assert (above | ~tree.valid).all()
    deepest = int((tree.depth[:, 1:] * tree.valid).max()) if tree.size else 0
    assert tree.max_depth == deepest <= spec.depth


specs = st.builds(
    SharedTree,
    depth=st.integers(1, 4),
    width=st.integers(1, 4),
    budget=st.integers(1, 60),
    per_row=st.none() | st.integers(1, 30),
)


@given(specs, st.integers(0, 10_000), st.integers(1, 5), st.floats(0.0, 0.6))
@settings(max_examples=80)
def test_it_keeps_the_batch_s_best(spec: SharedTree, seed: int, batch: int, threshold: float) -> None:
    """With distinct scores the choice is unique."""
    spec = dataclasses.replace(spec, threshold=threshold)
    rows = [Text(seed + row, spec.width, None) for row in range(batch)]
    tree = grow(spec, rows)
    check(spec, tree, batch)
    best: list[Node] = []
    for row in range(batch):
        mine = sorted((n for n in candidates(spec, rows) if n.row == row), key=lambda n: -n.score)
        best += [n for n in mine[: spec.per_row] if threshold == 0.0 or n.score >= math.log(threshold)]
    best = sorted(best, key=lambda node: -node.score)[: spec.budget]
    for row in range(batch):
        mine = sorted((node for node in best if node.row == row), key=lambda node: node.at)
        column = {-1: -1, **{node.at: i for i, node in enumerate(mine)}}
        count = len(mine)
        assert tree.valid[row].tolist() == [i < count for i in range(tree.size)]
        assert tree.tokens[row, :count].tolist() == [node.token for node in mine]
        assert tree.parents[row, :count].tolist() == [column[node.parent] for node in mine]
        torch.testing.assert_close(tree.logprob[row, :count], torch.tensor([node.score for node in mine]))


@st.composite
def tables(draw: st.DrawFn) -> ValueTable:
    """Any table, plateaus included."""
    numbers = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=4 * BINS, max_size=4 * BINS))
    return ValueTable(np.array(numbers).reshape(2, 2, BINS))


@given(specs, tables(), st.integers(0, 10_000), st.integers(1, 4), st.sampled_from(GRIDS), st.sampled_from([0.0, 0.5]))
@settings(max_examples=150)
def test_whatever_things_are_worth_a_tree_stays_a_tree(
    spec: SharedTree, table: ValueTable, seed: int, batch: int, grid: tuple[float, ...] | None, threshold: float
) -> None:
    groups = tuple(row % 2 for row in range(batch))
    spec = dataclasses.replace(spec, threshold=threshold)
    rows = [Text(seed + row, spec.width, grid) for row in range(batch)]
    tree = grow(PlannedTree(spec, values=table, groups=groups), rows)
    check(spec, tree, batch)

    if grid is not None:
        return  # which of equals goes on is the beam's own affair
    offered = [n for n in candidates(spec, rows, table, groups) if math.exp(n.worth) >= threshold]
    chosen = {(row, int(tree.tokens[row, node])) for row, node in tree.valid.nonzero().tolist()}
    kept = [node for node in offered if (node.row, node.token) in chosen]
    assert len(kept) == len(chosen)
    if spec.per_row is None:
        assert len(kept) == min(spec.budget, len(offered))
        left = [node.worth for node in offered if (node.row, node.token) not in chosen]
        assert not left or not kept or max(left) <= min(node.worth for node in kept)


@given(specs, st.integers(0, 1000), st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=40)
def test_rows_that_are_not_drafting_leave_the_budget_to_others(
    spec: SharedTree, seed: int, drafting: list[bool]
) -> None:
    tree = grow(spec, [Text(seed + row, spec.width, None) for row in range(4)], drafting)
    check(spec, tree, 4)
    assert not tree.valid[~torch.tensor(drafting)].any()
    offered = spec.width + spec.width * sum(min(spec.width, spec.width**d) for d in range(1, spec.depth))
    assert tree.counted == min(spec.budget, sum(drafting) * min(offered, spec.per_row or offered))


@given(specs, st.integers(0, 10_000), st.lists(st.booleans(), min_size=1, max_size=4), st.booleans())
@example(SharedTree(3, 3, 1), 1066, [False], True)  # two paths take the same two steps, in either order
@settings(max_examples=60)
def test_a_device_grows_the_trees_of_the_host(spec: SharedTree, seed: int, drafting: list[bool], valued: bool) -> None:
    """There the number of nodes isn't known, so that trees are padded; otherwise they are the same."""
    generator = np.random.default_rng(seed)
    table = ValueTable(np.sort(generator.random((2, 2, BINS)))[:, :, ::-1]) if valued else None
    groups = tuple(generator.integers(0, 2, len(drafting)).tolist())
    plan = PlannedTree(spec, values=table, groups=groups, keeps_candidates=True)
    rows = [Text(seed + row, spec.width, None) for row in range(len(drafting))]
    assume(not tied(candidates(spec, rows, table, groups)))  # which of equals goes on is the beam's own affair
    here = grow(plan, rows, drafting)
    there = grow(plan, rows, growth=SharedGrowth(plan, len(rows), CPU, drafting))
    assert here.network.candidates is not None
    assert there.network.candidates is not None
    for ours, theirs in zip(here.network.candidates.scores, there.network.candidates.scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    compact = dataclasses.replace(there, counted=None).compact()
    assert torch.equal(here.valid, compact.valid)
    for ours, theirs in ((here.tokens, compact.tokens), (here.parents, compact.parents)):
        assert torch.equal(ours[here.valid], theirs[here.valid])
    torch.testing.assert_close(here.logprob[here.valid], compact.logprob[here.valid])


def test_sure_rows_get_more() -> None:
    sure: list[float] = [-0.05, -4.0]
    unsure: list[float] = [-2.0, -2.1]

    class Fixed(Text):
        def __init__(self, steps: list[float]) -> None:
            super().__init__(0, 2, None)
            self.steps = steps

        def children(self, token: int) -> list[float]:
            del token
            return self.steps

    tree = grow(SharedTree(4, 2, 6), [Fixed(unsure), Fixed(sure)])
    assert tree.valid.sum(1).tolist() == [2, 4]
    hopeless = grow(SharedTree(4, 2, 6, threshold=0.5), [Fixed(unsure), Fixed(unsure)])
    assert (hopeless.size, hopeless.counted, hopeless.max_depth) == (0, 0, 0)


def test_drafting_stops_when_no_row_has_a_node_worth_going_on_from() -> None:
    growth = SharedTree(8, 2, 10, threshold=0.3).start(2, CPU, [True, False])
    tokens = torch.zeros(2, 1, 2, dtype=torch.int64)
    idle = [[-0.01, -0.5]]
    assert growth.expand(torch.tensor([[[-0.6, -2.0]], idle]), tokens) is not None
    assert growth.expand(torch.tensor([[[-0.7, -2.0]] * 2, idle * 2]), tokens.expand(-1, 2, -1)) is None
    made = growth.tree()
    assert (made.counted, made.network.levels) == (1, 2)


def test_candidates_are_kept_only_when_wanted() -> None:
    rows = [Text(1, 3, None), Text(2, 3, None)]
    assert grow(SharedTree(3, 3, 5), rows).network.candidates is None
    offered = grow(PlannedTree(SharedTree(3, 3, 5), keeps_candidates=True), rows).network.candidates
    assert offered is not None
    assert [level.shape[1] for level in offered.scores] == [3, 9, 9]
    assert [beam.shape[1] for beam in offered.beams] == [3, 3]
    for row in range(2):
        made = [n.score for n in candidates(SharedTree(3, 3, 5), rows) if n.row == row]
        torch.testing.assert_close(torch.cat(offered.scores, dim=1)[row], torch.tensor(made))


@given(st.lists(st.floats(-1e4, 0.0, width=32), min_size=2, max_size=50))
def test_worth_never_rises_as_probability_falls(scores: list[float]) -> None:
    ordered = np.sort(np.array(scores, dtype=np.float32))[::-1]
    found = bins(ordered)
    assert (np.diff(found) >= 0).all()
    values = np.stack((np.linspace(1, 0.2, BINS), np.linspace(0.9, 0.1, BINS)))[None]
    looked = ValueTable(values).look_up(torch.tensor(ordered.copy()).view(1, 1, -1), torch.zeros(1).long())
    expected = np.log(np.concatenate((values[0, 0, found[:1]], values[0, 1, found[1:]]))) + 1e-4 * ordered
    np.testing.assert_allclose(looked[0, 0].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert (np.diff(looked[0, 0].numpy()) <= 0).all()


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, -math.inf]), min_size=1, max_size=12), st.integers(1, 12))
def test_greatest_prefers_the_earlier_among_equals(worth: list[float], count: int) -> None:
    count = min(count, len(worth))
    best = sorted(range(len(worth)), key=lambda i: -worth[i])[:count]
    assert top_k_mask(torch.tensor([worth]), count)[0].nonzero().flatten().tolist() == sorted(best)


def test_texts() -> None:
    assert parse_tree("shared:5,4,16") == SharedTree(5, 4, 16)
    assert parse_tree("shared:5,4,16,8") == SharedTree(5, 4, 16, 8)
    assert parse_tree("shared:5,4,16,8,0.25") == SharedTree(5, 4, 16, 8, 0.25)
    for wrong in ("shared:5,4", "shared:5,4,1.5", "shared:5,4,16,0.5", "shared:1,2,3,4,0.5,6"):
        with pytest.raises(UsageError, match="shared:DEPTH,WIDTH,BUDGET"):
            parse_tree(wrong)
    for numbers, name in (("0,1,1", "depth"), ("1,0,1", "width"), ("1,1,0", "budget"), ("1,1,1,0", "per_row")):
        with pytest.raises(UsageError, match=f"shared tree: {name} must be at least 1"):
            parse_tree(f"shared:{numbers}")
    with pytest.raises(UsageError, match="threshold"):
        parse_tree("shared:1,1,1,1,1.0")


@given(st.integers(0, 500), st.integers(2, 5), st.sampled_from([0.0, 0.02, 0.3]))
@settings(max_examples=40)
def test_dear_padding_makes_rows_alike_and_trees_stay_trees(seed: int, batch: int, step: float) -> None:
    budget = 8 * batch
    plan = PlannedTree(
        SharedTree(3, 2, budget, per_row=8),
        prices=tuple(0.05 * n for n in range(1, budget + 1)),
        padding_prices=tuple(step * n for n in range(1, budget + 1)),
    )
    tree = grow(plan, [Text(seed + row, 2, None) for row in range(batch)])
    counts = tree.valid.sum(1)
    assert int(counts.sum()) == tree.counted
    kept = torch.cat((torch.ones(batch, 1, dtype=torch.bool), tree.valid), dim=1)
    assert bool(kept.gather(1, tree.parents + 1)[tree.valid].all())
    if step == 0.3:
        assert len(set(counts.tolist())) == 1  # no node is worth three tenths of every row it makes wait


def test_padding_has_a_price_only_where_nodes_have() -> None:
    with pytest.raises(UsageError, match="padding_prices need `prices` of nodes as well"):
        PlannedTree(SharedTree(2, 1, 2), padding_prices=(0.1,))


def priced(rows: list[Text], calibrations: tuple[float, ...] | None, price: float = 0.25) -> DraftTree:
    """The trees of `rows` where every node costs `price`."""
    budget = 16 * len(rows)
    prices = tuple(price * n for n in range(1, budget + 1))
    return grow(PlannedTree(SharedTree(3, 2, budget), prices=prices, calibrations=calibrations), rows)


def test_a_row_whose_tokens_are_worth_less_gets_fewer_nodes() -> None:
    rows = [Text(3, 2, None) for _ in range(2)]  # twice the same
    plan = PlannedTree(SharedTree(3, 2, 32), prices=tuple(0.1 * n for n in range(1, 33)))
    same = grow(plan, rows)
    assert len(set(same.valid.sum(1).tolist())) == 1
    less = grow(dataclasses.replace(plan, weights=(1.0, 0.25)), rows).valid.sum(1).tolist()
    assert less[0] == same.valid.sum(1)[0] > less[1]


@given(st.integers(0, 500), st.integers(1, 3), st.sampled_from([0.4, 1.0, 1.7]))
@settings(max_examples=40)
def test_a_text_whose_nodes_are_accepted_less_pays_more_for_them(seed: int, batch: int, calibration: float) -> None:
    """A node's value changes by the text's factor, as if its price changed the other way; what it promised doesn't."""
    rows = [Text(seed + row, 2, None) for row in range(batch)]
    dear = priced(rows, None, 0.25 / calibration)
    tree = priced(rows, (calibration,) * batch)
    assert torch.equal(tree.tokens, dear.tokens)
    assert torch.equal(tree.valid, dear.valid)
    assert tree.network.promise is not None
    torch.testing.assert_close(torch.tensor(tree.network.promise), (tree.logprob.exp() * tree.valid).sum(1))
    own = priced(rows, (calibration, *(1.0,) * (batch - 1))).valid.sum(1)[0]
    assert own == dear.valid.sum(1)[0]


def test_a_search_of_one_row_has_the_prices_of_its_text() -> None:
    plan = PlannedTree(SharedTree(2, 2, 4), prices=(0.2, 0.4, 0.6, 0.8), calibrations=(0.5,), level_price=0.3)
    search = plan.search(1)
    assert search.calibration == 0.5
    assert search.level_price == 0.3
    assert search.prices is not None
    assert search.prices.tolist() == [0.2, 0.4, 0.6, 0.8]


def test_levels_that_come_in_one_call_are_all_taken() -> None:
    """They cost nothing any more, so what a further level must gain ends only drafts that are made level by level."""
    plan = PlannedTree(SharedTree(3, 1, 3), prices=(0.1, 0.2, 0.3), level_price=10.0)
    growth = plan.start(1, torch.device("cpu"))
    growth.expand_all([1, 1, 1], [[5, 6, 7]], [[-1, 0, 1]], [[-0.1, -0.1, -0.1]], [[False, False, False]])
    assert growth.tree().tokens.tolist() == [[5, 6, 7]]
    one_by_one = plan.start(1, torch.device("cpu"))
    assert one_by_one.expand(torch.tensor([[[-0.1]]]), torch.tensor([[[5]]])) is None
