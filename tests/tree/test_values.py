"""Choosing the nodes to verify, against all possible choices."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.tree.values import NodeChoice, may_pay, most_profitable, most_profitable_of_a_row

VALUES = st.lists(st.lists(st.sampled_from((0.0, 0.1, 0.3, 0.5, 0.9)), min_size=3, max_size=3), min_size=1, max_size=3)
STEPS = st.lists(st.sampled_from((0.0, 0.1, 0.2, 0.4)), min_size=9, max_size=9)


def profit(values: list[list[float]], counts: tuple[int, ...], prices: np.ndarray, padding: np.ndarray) -> float:
    """Value less price of verifying the `counts` best candidates of each row."""
    brought = sum(sum(sorted(row, reverse=True)[:count]) for row, count in zip(values, counts, strict=True))
    nodes = sum(counts)
    padded = len(counts) * max(counts) - sum(counts)
    return brought - float(np.append(0.0, prices)[nodes]) - float(np.append(0.0, padding)[padded])


@given(VALUES, STEPS, STEPS)
def test_no_other_number_of_nodes_a_row_pays_more(
    values: list[list[float]], steps: list[float], padding_steps: list[float]
) -> None:
    prices = np.cumsum(steps)
    padding = np.cumsum(padding_steps)
    per_row, nodes = most_profitable(np.array(values), tuple(prices), tuple(padding))
    ranked = sorted((value, row) for row, each in enumerate(values) for value in sorted(each, reverse=True)[:per_row])
    kept = [row for _, row in ranked[len(ranked) - nodes :]]
    found = profit(values, tuple(map(kept.count, range(len(values)))), prices, padding)
    usable = [sum(value > 0.0 for value in row) for row in values]
    best = max(profit(values, counts, prices, padding) for counts in product(*(range(most + 1) for most in usable)))
    assert found >= -1e-9
    assert found >= best - 1e-9


@given(VALUES.map(lambda rows: rows[0]), STEPS, st.none() | st.integers(1, 3))
def test_a_single_row_gets_what_pays_most(values: list[float], steps: list[float], limit: int | None) -> None:
    prices = np.cumsum(steps)
    chosen = most_profitable_of_a_row(values, prices.tolist(), limit)
    assert chosen == sorted(range(3), key=lambda node: -values[node])[: len(chosen)]  # among equals the earlier ones
    usable = min(sum(value > 0.0 for value in values), limit or 3)
    profits = [profit([values], (count,), prices, prices) for count in range(usable + 1)]
    assert len(chosen) == profits.index(max(profits))


def test_padding_that_costs_more_than_it_brings_is_avoided() -> None:
    values = np.array([[0.9, 0.8, 0.3], [0.6, 0.3, 0.1]])
    prices = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
    assert most_profitable(values, prices, None) == NodeChoice(3, 5)
    assert most_profitable(values, prices, (0.0, 0.0, 0.0)) == NodeChoice(3, 5)
    assert most_profitable(values, prices, (0.2, 0.4, 0.6)) == NodeChoice(2, 4)  # two nodes for each
    assert most_profitable(values, (2.0, 4.0), (0.2,)).nodes == 0


@given(VALUES, STEPS, st.sampled_from((0.5, 1.0, 1.3, 4.0)))
def test_a_round_that_makes_more_than_its_price_is_worth_its_own_rate(
    values: list[list[float]], steps: list[float], alone: float
) -> None:
    prices = np.cumsum(steps)
    rows = len(values)
    offered = sorted((value for row in values for value in row if value > 0.0), reverse=True)
    totals = np.append(0.0, np.cumsum(offered))
    speeds = (rows + totals) / (alone + np.append(0.0, prices)[: len(totals)])
    profits = totals - np.append(0.0, prices)[: len(totals)]
    judged = speeds if speeds.max() > 1.0 else profits
    nodes = [most_profitable(np.array(values), tuple(prices), None, alone=alone).nodes]
    if rows == 1:
        nodes.append(len(most_profitable_of_a_row(values[0], prices.tolist(), None, alone)))
    assert judged[nodes] == pytest.approx(judged.max())  # among equals, rounding decides


def test_a_draft_goes_on_where_further_levels_may_pay() -> None:
    """Passes get dearer by steps: three nodes cost little, five to eight hardly more than four."""
    prices = np.array([0.05, 0.05, 0.05, 1.0, 1.05, 1.1, 1.15, 1.2])
    sure = np.array([0.96, 0.98, 0.94])
    doubtful = np.array([0.8, 0.6, 0.45])
    assert may_pay(sure, 0.94, 3, 8, prices, 0.01)
    assert not may_pay(sure, 0.94, 3, 4, prices, 0.01), "one level more only reaches the dear step"
    assert not may_pay(sure, 0.94, 3, 8, prices, 0.9), "levels are too dear"
    assert not may_pay(sure, 0.94, 3, 8, prices[:3], 0.01), "no more nodes are allowed"
    assert not may_pay(doubtful, 0.45, 3, 8, prices, 0.01)
    assert may_pay(doubtful, 0.45, 3, 8, prices, -math.inf), "nothing but the shape ends drafts"
