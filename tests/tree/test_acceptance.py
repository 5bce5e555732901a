"""Values: monotone frequencies of acceptance, from the prior to what was seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from eyas.tree import acceptance as rates
from eyas.tree.acceptance import GROUPS, Acceptance, LearnedValues, graded, non_increasing
from eyas.tree.draft_tree import DraftTree, Proposal, Source, TreeSpec
from eyas.tree.shared import SharedTree
from eyas.tree.values import BIN_CENTERS, bins


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), min_size=1, max_size=20))
def test_never_rising_is_isotonic_regression(points: list[tuple[float, float]]) -> None:
    values, weights = np.array(points).T
    expected = isotonic_regression(values, weights=weights, increasing=False).x
    np.testing.assert_allclose(non_increasing(values, weights), expected, atol=1e-9)


def seen(acceptance: Acceptance, group: int, later: bool, p: float, rate: float, rounds: int = 400) -> None:
    """Ten steps per round of probability `p`, accepted at `rate`."""
    draw = np.random.default_rng(0)
    index = int(bins(np.log(np.array([p])))[0])
    for _ in range(rounds):
        acceptance.learn(np.full(10, group), np.full(10, later), np.full(10, index), draw.random(10) < rate)


def at(p: float) -> int:
    return int(bins(np.log(np.array([p])))[0])


def test_nothing_seen_takes_the_drafter_at_its_word() -> None:
    table = Acceptance().table()
    np.testing.assert_allclose(table.values, np.broadcast_to(np.exp(BIN_CENTERS), (2, 2, len(BIN_CENTERS))))


def test_what_was_accepted_counts_and_groups_are_apart() -> None:
    acceptance = Acceptance()
    seen(acceptance, 1, False, 0.5, 0.8)
    values = acceptance.table().values
    assert abs(values[1, 0, at(0.5)] - 0.8) < 0.03
    assert abs(values[0, 0, at(0.5)] - 0.5) < 0.05  # nothing was seen of greedy rows
    assert (np.diff(values, axis=2) <= 0).all()


def test_first_children_are_apart_from_others_and_never_worth_less() -> None:
    acceptance = Acceptance()
    seen(acceptance, 0, False, 0.3, 0.5)
    seen(acceptance, 0, True, 0.3, 0.2)
    values = acceptance.table().values[0, :, at(0.3)]
    np.testing.assert_allclose(values, [0.5, 0.2], atol=0.05)
    seen(acceptance, 0, True, 0.3, 0.9, 2000)
    first, other = acceptance.table().values[0, :, at(0.3)]
    assert other <= first


def test_old_rounds_fade() -> None:
    acceptance = Acceptance()
    seen(acceptance, 0, False, 0.5, 0.9, 500)
    seen(acceptance, 0, False, 0.5, 0.2, 1500)
    assert acceptance.table().values[0, 0, at(0.5)] < 0.3


def test_few_nodes_show_that_a_drafter_is_less_sure_than_it_could_be() -> None:
    acceptance = Acceptance()
    seen(acceptance, 0, False, 0.3, 0.6, rounds=4)
    values = acceptance.table().values[0, 0]
    assert values[at(0.5)] > 0.58  # nothing was seen there
    assert values[at(0.1)] > 0.13


def test_rounds_counted_together_are_worth_what_they_are_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    rounds = []
    for _ in range(150):
        logprob = torch.tensor([[-0.1, -1.2, -0.4]]) - torch.rand(1, 3, generator=draw)
        parents = torch.tensor([[-1, -1, 0]])
        tree = DraftTree(torch.tensor([[5, 6, 7]]), parents, logprob, torch.ones(1, 3, dtype=torch.bool), 2)
        rounds.append((tree, [[[0], [0, 1], [0, 2], [0, 1, 3]][int(torch.randint(4, (1,), generator=draw))]]))
    tables = []
    for most in (1, 64):
        monkeypatch.setattr(rates, "_MAX_QUEUED_ROUNDS", most)
        acceptance = Acceptance()
        for tree, paths in rounds:
            acceptance.learn_tree(tree, paths, np.zeros(1, dtype=np.int64))
        for tree, paths in rounds[:10]:
            acceptance.learn_tree(tree, paths, np.zeros(1, dtype=np.int64))
        tables.append(acceptance.table().values)
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-9)
    assert abs(tables[0] - Acceptance().table().values).max() > 0.1


@pytest.mark.parametrize(("change", "groups"), [("learned", [1]), ("resumed", [0, 1])])
def test_a_table_shows_what_has_changed_since_the_last(change: str, groups: list[int]) -> None:
    tables = []
    for renewed in (True, False):
        acceptance = Acceptance()
        for group in (0, 1):
            seen(acceptance, group, later=False, p=0.4, rate=0.9, rounds=20)
        before = acceptance.table() if renewed else None
        if change == "learned":
            seen(acceptance, 1, later=True, p=0.2, rate=0.7, rounds=20)
        else:
            acceptance.counts[0][:] *= 3.0
        tables.append(acceptance.table())
        assert tables[-1] is not before
        assert acceptance.table() is tables[-1]
    assert np.array_equal(tables[0].values[groups], tables[1].values[groups])


def grown(spec: TreeSpec) -> DraftTree:
    """Two rows' trees of a timid drafter: children of every node are the tokens 0, 1, 2, none of them likely."""
    growth = spec.start(2, torch.device("cpu"))
    width = 1
    steps = torch.tensor([0.3, 0.25, 0.2]).log()
    while (frontier := growth.expand(steps.expand(2, width, 3), torch.arange(3).expand(2, width, 3))) is not None:
        width = frontier.tokens.shape[1]
    return growth.tree()


def first_children(tree: DraftTree, row: int) -> list[int]:
    """The path that always takes token 0."""
    path = [0]
    for node in range(tree.size):
        if tree.valid[row, node] and tree.parents[row, node] == path[-1] - 1 and tree.tokens[row, node] == 0:
            path.append(node + 1)
    return path


def test_what_is_accepted_more_often_than_its_probability_says_makes_longer_paths() -> None:
    """A greedy row's first guess is always right; the sampled one's never is."""
    shape = SharedTree(3, 3, 6, 3)
    values = LearnedValues()
    groups = (0, 1)
    before = grown(shape.valued(values.table, groups))
    assert before.depth.max() == 1
    for _ in range(40):
        tree = grown(shape.valued(values.table, groups))
        values.learn(tree, [first_children(tree, 0), [0]], np.array(groups))
    after = grown(shape.valued(values.table, groups))
    assert first_children(after, 0) == [0, 1, 2, 3]
    assert after.depth[1][1:][after.valid[1]].max() == 1
    assert math.isclose(after.logprob[0].min(), 3 * math.log(0.3), rel_tol=1e-5)  # which stays the drafter's


def test_copies_are_graded_by_what_follows_even_if_they_were_not_verified() -> None:
    """[1, 2, 3] and [1, 9] were found; 1 and 2 followed, then something else."""
    acceptance = Acceptance(GROUPS * len(Source))
    p = math.log(0.7)
    q = math.log(0.2)
    found = Proposal([1, 2, 3, 9], [-1, 0, 1, 0], [p, p, p, q])
    acceptance.learn_copies([graded(found, [1, 2, 8]), graded(Proposal(), [4])], np.array([0, 1]))
    offered, accepted = acceptance.counts
    own = Source.LOOKUP * GROUPS
    first, later = bins(np.array([p, q]))
    assert offered[own, 0, first] == pytest.approx(3.0)
    assert accepted[own, 0, first] == pytest.approx(2.0)
    assert offered[own, 1, later] == pytest.approx(1.0)
    assert offered.sum() == pytest.approx(4.0)
    assert accepted.sum() == pytest.approx(2.0)
