"""The curve: a point for each minute and generation, of drafted rounds alone."""

from __future__ import annotations

from eyas.learn import curve
from eyas.learn.curve import Curve


def test_a_point_is_a_minute_of_one_generation() -> None:
    now = [600.0]
    made = Curve(lambda: now[0])
    made.add(0, [0, 0], [0, 0])
    assert made.read() == [], "plain rounds say nothing"
    made.add(0, [3, 0], [2, 0])
    now[0] = 659.0
    made.add(0, [3, 3], [1, 3])
    made.add(1, [3], [0])
    now[0] = 660.0
    made.add(1, [3], [1])
    assert made.read() == [
        {"time": 600.0, "generation": 0, "accept_length": 3.0},
        {"time": 600.0, "generation": 1, "accept_length": 1.0},
        {"time": 660.0, "generation": 1, "accept_length": 2.0},
    ]


def test_a_day_is_kept() -> None:
    now = [0.0]
    made = Curve(lambda: now[0])
    for minute in range(curve._KEPT + 5):
        now[0] = 60.0 * minute
        made.add(0, [1], [1])
    assert len(made.read()) == curve._KEPT
    assert made.read()[0]["time"] == 300.0
