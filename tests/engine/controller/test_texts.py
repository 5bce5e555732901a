"""What texts yield compared with others, and what that does to forecasts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from eyas.engine.controller.gain import Forecast, GainModel
from eyas.engine.controller.texts import SHARES, Texts, Yield


def of_one(model: GainModel) -> Forecast:
    """The forecast for the text 0."""
    model.settle()
    return model.forecast([0], [0])


def test_a_text_that_is_offered_less_than_others_is_known_soon_and_forgotten_with_it() -> None:
    model = GainModel((1, 2), 4)
    model.texts.follow([0])
    typical = of_one(model)
    for _ in range(8):
        model.texts.judge(2.0, [0], [0.25], [0], None)
    assert model.texts.drift < 0.6
    poor = of_one(model)
    assert model.texts.drift == 1.0
    assert (poor.nodes <= 0.6 * typical.nodes).all()
    assert (poor.accepted <= 0.6 * typical.accepted + 1e-9).sum() > 0.7 * typical.accepted.size  # wide beams: at most 1
    assert (poor.levels <= typical.levels).all()
    model.texts.follow([1])
    model.texts.follow([0])
    assert (of_one(model).accepted >= 0.4 * typical.accepted).all()  # others may be like it


def test_a_text_is_known_once_it_or_four_others_were_drafted_for() -> None:
    texts = Texts()
    seen = []
    for text in range(6):
        texts.follow([text])
        before = texts.known
        if text != 1:
            texts.judge(1.0, [text], [1.0], [0], None)
        seen.append((before, texts.known))
    assert seen == [(False, True), (False, False), (False, True), (False, True), (False, True), (True, True)]
    several = Texts()
    several.follow([0, 1])
    several.judge(1.0, [0, 1], None, [1, 0], [True, False])
    assert not several.known
    resumed = Texts()
    resumed.follow([0])
    resumed.resume()
    assert resumed.known


def test_a_text_whose_nodes_are_accepted_less_than_others_has_as_many_of_them() -> None:
    model = GainModel((1, 2), 4)
    model.texts.follow([0, 1])
    typical = of_one(model)
    for _ in range(8):
        model.texts.judge(4.0, [0, 1], [2.0, 2.0], [0, 2], None)
    poor = of_one(model)
    np.testing.assert_allclose(poor.nodes, typical.nodes, rtol=0.1)
    assert (poor.accepted <= 0.5 * typical.accepted + 1e-9).sum() > 0.7 * typical.accepted.size
    assert model.texts.assumed(0).calibration < 0.5
    assert model.texts.assumed(1).calibration == pytest.approx(1.0)
    assert model.texts.assumed(7).calibration == pytest.approx(1.0)


def test_rows_that_are_not_drafted_for_show_nothing() -> None:
    texts = Texts()
    texts.follow([0, 1])
    texts.judge(4.0, [0, 1], [2.0, 0.0], [2, 0], [True, False])
    assert texts._evidence[1].forecast == 0.0
    assert texts._evidence[0].forecast > 0.0


def test_a_new_text_is_expected_to_be_like_the_latest_ones_however_long_they_were() -> None:
    model = GainModel((1, 2), 4)
    model.texts.follow([0])
    typical = of_one(model).accepted

    def write(offered: float, kept: int, drafts: Sequence[int]) -> Yield:
        """Texts of so many drafts; returns what the next one is expected to yield."""
        for count in drafts:
            model.texts.follow([1])
            for _ in range(count):
                model.texts.judge(2.0 * model.texts.assumed(1).accepted, [1], [offered], [kept], None)
            model.texts.follow([0])
        model.settle()
        return model.texts.assumed(0)

    unsure = write(0.0, 0, [6] * 6)
    assert unsure.offers < 0.35
    assert unsure.calibration == 1.0
    assert (of_one(model).accepted <= 0.4 * typical).sum() > 0.7 * typical.size
    assert write(2.0, 2, [6] * 6).offers > 0.75
    write(2.0, 2, [6] * 10)
    wrong = write(2.0, 0, [200, 6, 6, 6, 6])
    assert wrong.calibration < 0.5
    assert wrong.offers == pytest.approx(1.0, abs=0.1)
    assert write(2.0, 2, [6] * 6).calibration > 0.75


def expected(texts: Texts) -> float:
    """The mean share of guessed tokens."""
    return float(texts.guessed() @ SHARES)


def spread(texts: Texts) -> float:
    """The standard deviation of the share of guessed tokens."""
    return math.sqrt(texts.guessed() @ (SHARES - expected(texts)) ** 2)


def test_how_often_a_text_is_guessed_is_open_until_it_was_tried_and_after_a_while_again() -> None:
    texts = Texts()
    texts.follow([0])
    assert spread(texts) > 0.2
    for kept in (0, 3):
        texts.follow([kept])
        for _ in range(40):
            texts.judge(1.0, [kept], [1.0], [kept], None)
        assert abs(expected(texts) - (kept > 0)) < 0.1
        assert spread(texts) < 0.1
        for _ in range(300):
            texts.rest()
        assert spread(texts) > 0.2


def test_after_texts_that_nobody_guessed_the_next_is_expected_to_be_one() -> None:
    texts = Texts()
    for text in range(8):
        texts.follow([text])
        for _ in range(10):
            texts.judge(1.0, [text], [1.0], [0], None)
    texts.follow([8])
    assert expected(texts) < 0.25
    for text in range(9, 60):  # none of which is tried
        texts.follow([text])
    assert expected(texts) > 0.35


def test_a_text_that_gets_ahead_is_worth_less_until_the_others_have_caught_up() -> None:
    texts = Texts()
    texts.follow([5, 6, 7])
    assert texts.weights([5, 6, 7]) == (1.0, 1.0, 1.0)
    for _ in range(128):
        texts.advance([5, 6, 7], [9, 1, 1])
    ahead, *others = texts.weights([5, 6, 7])
    assert others[0] == others[1] > 1.5
    assert others[0] / ahead == pytest.approx(1.0 + 8.0 * (1.0 - math.exp(-1.0)), rel=0.15)
    texts.follow([5, 6, 8])
    assert texts.weights([8])[0] == 1.0  # alone, none makes others wait
    assert texts.weights([5, 6, 8]) == (ahead, *others)  # a new text counts as one that has got nowhere
    for _ in range(800):
        texts.advance([5, 6, 8], [1, 1, 1])
    assert texts.weights([5, 6, 8]) == (1.0, 1.0, 1.0)
    texts.follow([6])
    texts.follow([5, 6])
    assert texts.weights([5, 6]) == (1.0, 1.0)
