"""What a wide draft says of narrower and shallower ones is what those would have offered."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eyas.engine.controller.supply import Supply
from eyas.tree.draft_tree import BeamCandidates
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import BIN_CENTERS, BINS, bins

WIDTHS = (1, 2, 3, 5)


def grow(spec: PlannedTree, seed: int, rows: int) -> tuple[BeamCandidates, list[set[tuple[int, ...]]]]:
    """Candidates and each level's frontier as paths of ranks; a path's children are the same in every spec."""
    growth = spec.start(rows, torch.device("cpu"))
    paths: list[list[tuple[int, ...]]] = [[()] for _ in range(rows)]
    frontiers: list[set[tuple[int, ...]]] = []
    while True:
        steps = torch.tensor(
            [[children(seed + row, path)[: spec.max_fanout] for path in mine] for row, mine in enumerate(paths)]
        )
        frontier = growth.expand(steps, torch.arange(spec.max_fanout).expand(steps.shape))
        if frontier is None:
            break
        grown = zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        paths = [
            [(*mine[p], t) for p, t in zip(ps, ts, strict=True)] for mine, (ps, ts) in zip(paths, grown, strict=True)
        ]
        frontiers.append({(row, *path) for row, mine in enumerate(paths) for path in mine})
    offered = growth.tree().network.candidates
    assert offered is not None
    return offered, frontiers


def children(seed: int, path: tuple[int, ...]) -> list[float]:
    draw = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
    return torch.randn(8, generator=draw).mul(2).log_softmax(0).sort(descending=True).values.tolist()


def learned(supply: Supply, offered: BeamCandidates, groups: list[int]) -> np.ndarray:
    """[G, W, D, K] rates after this draft."""
    supply.learn(offered, np.array(groups))
    return supply.rates


@given(st.integers(0, 5000), st.sampled_from([1, 2, 3]), st.integers(1, 3))
@settings(max_examples=60)
def test_a_wide_draft_shows_what_narrow_ones_offer(seed: int, narrow: int, rows: int) -> None:
    wide, wide_frontiers = grow(PlannedTree(SharedTree(4, 5, 1), keeps_candidates=True), seed, rows)
    own, frontiers = grow(PlannedTree(SharedTree(4, narrow, 1), keeps_candidates=True), seed, rows)
    assume(all(mine <= other for mine, other in zip(frontiers, wide_frontiers, strict=True)))
    groups = [row % 2 for row in range(rows)]
    rates = learned(Supply(WIDTHS, 6, prior_weight=0.0), wide, groups)
    for group in set(groups):
        mine = [row for row in range(rows) if groups[row] == group]
        for level, scores in enumerate(own.scores):
            expected = np.bincount(bins(scores.numpy()[mine]).ravel(), minlength=BINS) / len(mine)
            np.testing.assert_allclose(rates[group, WIDTHS.index(narrow), level], expected, atol=1e-6)


def test_below_a_draft_s_end_only_better_candidates_are_known_not_to_exist() -> None:
    offered, _ = grow(PlannedTree(SharedTree(2, 3, 1), keeps_candidates=True), 1, 1)
    supply = Supply((1, 3, 5), 4, prior_weight=0.0)
    # more than the next narrower beam
    supply._sums[:] = 7.0
    supply._weights[:] = 1.0
    supply.learn(offered, np.array([0]))
    best = int(bins(offered.scores[1].numpy()).min())
    rates = supply.rates[0]
    more = np.diff(rates, axis=0, prepend=0.0)
    assert (more[:2, 2:, :best] < 7.0).all()
    np.testing.assert_allclose(more[:2, 2:, best:], 7.0)
    np.testing.assert_allclose(more[2, 2:], 7.0)  # a wider beam might have offered more
    assert (supply.rates[1] == np.array([7.0, 14.0, 21.0])[:, None, None]).all()


def test_rows_that_draft_nothing_and_rows_beyond_the_sample_are_left_out() -> None:
    offered, _ = grow(PlannedTree(SharedTree(2, 3, 1), keeps_candidates=True), 3, 4)
    whole = learned(Supply(WIDTHS, 2, prior_weight=0.0), offered, [0, 0, 0, 0])
    one = BeamCandidates(tuple(s[:1] for s in offered.scores), tuple(b[:1] for b in offered.beams))
    first = Supply(WIDTHS, 2, prior_weight=0.0)
    first.learn(offered, np.zeros(4, dtype=np.int64), np.array([True, False, False, False]))
    np.testing.assert_allclose(first.rates, learned(Supply(WIDTHS, 2, prior_weight=0.0), one, [0]))
    assert not np.allclose(first.rates, whole)
    nobody = first.rates.copy()
    first.learn(offered, np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.bool_))
    np.testing.assert_array_equal(first.rates, nobody)


def test_the_prior_is_a_draft_of_a_plausible_text() -> None:
    supply = Supply(WIDTHS, 6)
    totals = supply.rates.sum(3)  # [G, W, D] candidates a level
    np.testing.assert_allclose(totals[0, :, 0], WIDTHS)
    np.testing.assert_allclose(totals[0, :, 3], np.square(WIDTHS))
    np.testing.assert_allclose(supply.best.sum(2), 1.0)


def test_levels_that_were_never_drafted_are_assumed_to_be_like_the_first() -> None:
    """Chains of one sure token each: without this, nothing would say that longer ones pay."""
    growth = PlannedTree(SharedTree(1, 1, 1), keeps_candidates=True).start(1, torch.device("cpu"))
    growth.expand(torch.tensor([[[0.95]]]).log(), torch.zeros(1, 1, 1, dtype=torch.int64))
    offered = growth.tree().network.candidates
    assert offered is not None
    supply = Supply(WIDTHS, 6)
    before = supply.best[0] @ np.exp(BIN_CENTERS)  # [D] the value of the best candidate at each depth
    for _ in range(20):
        supply.learn(offered, np.zeros(1, dtype=np.int64))
    after = supply.best[0] @ np.exp(BIN_CENTERS)
    assert before[4] < 0.3
    assert after[4] > 0.6
    np.testing.assert_allclose(supply.best[1] @ np.exp(BIN_CENTERS), before)  # another group


def test_of_many_rows_others_are_looked_at_each_time() -> None:
    """Every other row is sure; looking at the same half again and again would take all rows for those."""
    growth = PlannedTree(SharedTree(1, 1, 1), keeps_candidates=True).start(32, torch.device("cpu"))
    steps = torch.tensor([-0.005, -4.0] * 16).view(32, 1, 1)
    growth.expand(steps, torch.zeros(32, 1, 1, dtype=torch.int64))
    offered = growth.tree().network.candidates
    assert offered is not None
    supply = Supply((1,), 1)
    for _ in range(200):
        supply.learn(offered, np.zeros(32, dtype=np.int64))
    assert abs(supply.rates[0, 0, 0, bins(np.array([-0.005]))[0]] - 0.5) < 0.01
