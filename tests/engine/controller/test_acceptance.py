"""Values: monotone frequencies of acceptance, from the prior to what was seen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from eyas.engine.controller.acceptance import Acceptance, never_rising
from eyas.tree.values import BIN_CENTRES, bins


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), min_size=1, max_size=20))
def test_never_rising_is_isotonic_regression(points: list[tuple[float, float]]) -> None:
    values, weights = np.array(points).T
    expected = isotonic_regression(values, weights=weights, increasing=False).x
    np.testing.assert_allclose(never_rising(values, weights), expected, atol=1e-9)


def seen(acceptance: Acceptance, group: int, depth: int, p: float, rate: float, rounds: int = 400) -> None:
    """Ten nodes a round of path probability `p`, accepted at `rate`."""
    draw = np.random.default_rng(0)
    index = int(bins(np.log(np.array([p])))[0])
    for _ in range(rounds):
        acceptance.learn(
            np.full(10, group), np.full(10, depth), np.full(10, index), draw.random(10) < rate
        )  # fmt: skip


def test_nothing_seen_takes_the_drafter_at_its_word() -> None:
    table = Acceptance(4).table()
    np.testing.assert_allclose(table.values, np.broadcast_to(np.exp(BIN_CENTRES), (2, 4, len(BIN_CENTRES))))


def test_what_was_accepted_counts_and_groups_are_apart() -> None:
    acceptance = Acceptance(4)
    seen(acceptance, 1, 1, 0.5, 0.8)
    at = int(bins(np.log(np.array([0.5])))[0])
    values = acceptance.table().values
    assert abs(values[1, 0, at] - 0.8) < 0.03
    assert abs(values[0, 0, at] - 0.5) < 0.05  # nothing was seen of greedy rows
    assert (np.diff(values, axis=2) <= 0).all()
    assert (np.diff(values, axis=1) <= 0).all()


def test_a_depth_has_a_factor_of_its_own() -> None:
    acceptance = Acceptance(4)
    for depth, rate in ((1, 0.5), (2, 0.25)):
        seen(acceptance, 0, depth, 0.5, rate)
    at = int(bins(np.log(np.array([0.5])))[0])
    values = acceptance.table().values
    assert abs(values[0, 1, at] / values[0, 0, at] - 0.5) < 0.08


def test_old_rounds_fade() -> None:
    acceptance = Acceptance(2)
    seen(acceptance, 0, 1, 0.5, 0.9, 500)
    seen(acceptance, 0, 1, 0.5, 0.2, 1500)
    assert acceptance.table().values[0, 0, int(bins(np.log(np.array([0.5])))[0])] < 0.3
