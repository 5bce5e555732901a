"""Forecasts against what the simulated text really does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eyas.engine.controller.gain import THRESHOLDS, GainModel
from eyas.tree.shared import PlannedTree, SharedTree

from .simulation import Machine, Simulation, Text, mixed

WIDTHS = (1, 2, 4)


def trained(text: Text, rounds: int = 300) -> GainModel:
    """A model that saw the largest shape throughout."""
    gain = GainModel(WIDTHS, 4)
    simulation = Simulation(Machine(), text)
    rows = len(text.sharpness)
    for _ in range(rounds):
        gain.settle()
        spec = PlannedTree(SharedTree(4, WIDTHS[-1], 30 * rows), values=gain.values, keeps_candidates=True)
        draft = simulation.round(spec).draft
        assert draft is not None
        gain.learn(range(rows), draft, np.zeros(rows, dtype=np.int64), None)
    gain.settle()
    return gain


@pytest.mark.parametrize("rows", [1, 6])
def test_one_shape_s_drafts_forecast_every_smaller_one(rows: int) -> None:
    gain = trained(mixed(rows))
    forecast = gain.forecast(range(rows), (0,) * rows)
    for width, depth, threshold in ((1, 3, 8), (2, 2, 5), (4, 4, 3), (4, 4, 14)):
        shape = SharedTree(depth, WIDTHS[width // 2], 1000, threshold=float(THRESHOLDS[threshold]))
        spec = PlannedTree(shape, values=gain.values)
        rounds = 500 // rows + 100
        simulation = Simulation(Machine(), mixed(rows, seed=1))
        simulation.run(spec, rounds)
        assert simulation.nodes is not None
        at = (width // 2, depth - 1, threshold)
        assert forecast.nodes[at] == pytest.approx(simulation.nodes.sum() / rounds, rel=0.25, abs=0.1)
        rough = 0.1 if threshold < 10 else 0.2  # at the top one bin decides
        assert forecast.accepted[at] == pytest.approx(simulation.tokens / rounds - rows, rel=rough, abs=0.08)


def test_levels_are_drafted_while_some_row_goes_on() -> None:
    text = mixed(1)
    gain = trained(text)
    for rows in (1, 3):
        text = dataclasses.replace(text, sharpness=[text.sharpness[0]] * rows, followed=[text.followed[0]] * rows)
        forecast = gain.forecast(range(rows), (0,) * rows).levels
        assert (forecast[0] == 1.0).all()
        assert (np.diff(forecast, axis=0) >= 0).all()
        for threshold in (6, 12):
            spec = PlannedTree(SharedTree(4, 4, 1000, threshold=float(THRESHOLDS[threshold])), values=gain.values)
            levels = [text.draft(spec)[1] for _ in range(400)]
            assert forecast[3, threshold] == pytest.approx(np.mean(levels), rel=0.12)


def test_groups_add_up() -> None:
    gain = trained(mixed(1), 20)
    both, one, other = (gain.forecast(range(len(groups)), groups) for groups in ((0, 0, 0, 1, 1), (0,) * 3, (1,) * 2))
    np.testing.assert_allclose(both.nodes, one.nodes + other.nodes)
    np.testing.assert_allclose(both.accepted, one.accepted + other.accepted)
    assert (both.levels >= np.maximum(one.levels, other.levels) - 1e-9).all()
