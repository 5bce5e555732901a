"""Forecasts against what the simulated text really does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from eyas.engine.controller.gain import THRESHOLDS, Forecast, GainModel, Yield
from eyas.tree.shared import PlannedTree, SharedTree

from .simulation import Machine, Simulation, Text, mixed

WIDTHS = (1, 2, 4)


def trained(text: Text, rounds: int = 300) -> GainModel:
    """A model that saw the largest shape throughout."""
    gain, simulation = GainModel(WIDTHS, 4), Simulation(Machine(), text)
    rows = len(text.sharpness)
    for _ in range(rounds):
        gain.settle()
        spec = PlannedTree(SharedTree(4, WIDTHS[-1], 30 * rows), values=gain.values, keeps_candidates=True)
        draft = simulation.round(spec).draft
        assert draft is not None
        gain.learn(draft, np.zeros(rows, dtype=np.int64), None)
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


def of_one(model: GainModel) -> Forecast:
    """The forecast for the text 0."""
    model.settle()
    return model.forecast([0], [0])


def test_a_text_that_is_offered_less_than_others_is_known_soon_and_forgotten_with_it() -> None:
    model = GainModel((1, 2), 4)
    model.follow([0])
    typical = of_one(model)
    for _ in range(8):
        model.judge(2.0, [0], [0.25], [0], None)
    assert model.drift < 0.6
    poor = of_one(model)
    assert model.drift == 1.0
    assert (poor.nodes <= 0.6 * typical.nodes).all()
    assert (poor.accepted <= 0.6 * typical.accepted + 1e-9).sum() > 0.7 * typical.accepted.size  # wide beams: at most 1
    assert (poor.levels <= typical.levels).all()
    model.follow([1])
    model.follow([0])
    assert (of_one(model).accepted >= 0.4 * typical.accepted).all()  # others may be like it


def test_a_text_whose_nodes_are_accepted_less_than_others_has_as_many_of_them() -> None:
    model = GainModel((1, 2), 4)
    model.follow([0, 1])
    typical = of_one(model)
    for _ in range(8):
        model.judge(4.0, [0, 1], [2.0, 2.0], [0, 2], None)
    poor = of_one(model)
    np.testing.assert_allclose(poor.nodes, typical.nodes, rtol=0.1)
    assert (poor.accepted <= 0.5 * typical.accepted + 1e-9).sum() > 0.7 * typical.accepted.size
    low, usual = model.calibrations([0, 1])
    assert low < 0.5
    assert usual == pytest.approx(1.0)
    assert model.calibrations([7]) == (1.0,)


def test_rows_that_are_not_drafted_for_show_nothing() -> None:
    model = GainModel((1, 2), 4)
    model.follow([0, 1])
    model.judge(4.0, [0, 1], [2.0, 0.0], [2, 0], [True, False])
    assert model._texts[1].forecast == 0.0
    assert model._texts[0].forecast > 0.0


def test_a_lasting_error_of_forecasts_is_no_property_of_a_text_but_of_all() -> None:
    model = GainModel((1,), 2)
    for text in range(100):
        model.follow([text])
        for draft in range(20):
            model.settle()
            model.judge(2.0 * model._assumed(text).accepted, [text], [1.5], [1 + draft % 2], None)
    before = GainModel((1,), 2).forecast([0], [0]).accepted
    model.follow([0])
    assert model.drift == pytest.approx(1.0)
    np.testing.assert_allclose(of_one(model).accepted, 0.75 * before, rtol=0.05)


def test_a_new_text_is_expected_to_be_like_the_latest_ones_however_long_they_were() -> None:
    model = GainModel((1, 2), 4)
    model.follow([0])
    typical = of_one(model).accepted
    assert model.usual == 1.0

    def write(offered: float, kept: int, drafts: Sequence[int]) -> Yield:
        """Texts of so many drafts; returns what the next one is expected to yield."""
        for count in drafts:
            model.follow([1])
            for _ in range(count):
                model.judge(2.0 * model._assumed(1).accepted, [1], [offered], [kept], None)
            model.follow([0])
        model.settle()
        return model._assumed(0)

    unsure = write(0.0, 0, [6] * 6)
    assert unsure.offers < 0.35
    assert unsure.calibration == 1.0
    assert (of_one(model).accepted <= 0.4 * typical).sum() > 0.7 * typical.size
    assert model.usual == pytest.approx(model._usual / unsure.accepted)
    assert write(2.0, 2, [6] * 6).offers > 0.75
    write(2.0, 2, [6] * 10)
    wrong = write(2.0, 0, [200, 6, 6, 6, 6])
    assert wrong.calibration < 0.5
    assert wrong.offers == pytest.approx(1.0, abs=0.1)
    assert write(2.0, 2, [6] * 6).calibration > 0.75


def test_a_new_text_gets_the_benefit_of_the_doubt_until_it_has_shown_something() -> None:
    gain = trained(mixed(1), rounds=40)
    gain.follow([0, 1, 2, 3])
    assert gain.hope == pytest.approx(1.125)  # four texts differ less from the average
    gain.follow([0])
    assert gain.hope == pytest.approx(1.25)
    for _ in range(40):
        gain.judge(1.0, [0], [1.0], [1], None)
    assert 1.0 < gain.hope < 1.04
    gain.follow([0])
    assert gain.hope < 1.04  # the same text
    gain.follow([1])
    assert gain.hope == pytest.approx(1.25)  # another one
