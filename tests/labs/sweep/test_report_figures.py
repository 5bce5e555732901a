"""Plots of a sweep."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eyas.labs.sweep.report import knob_figure, pareto_front, trade_figure

points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(points)
def test_nothing_beats_the_front(made: list[tuple[float, float]]) -> None:
    front = pareto_front(made)
    assert set(front) <= set(made)
    assert bool(front) == bool(made)
    for x, y in made:
        beaten = any(a >= x and b >= y and (a, b) != (x, y) for a, b in made)
        assert ((x, y) in front) != beaten


def row(number: int, values: dict[str, Any], speed: float | None) -> dict[str, Any]:
    length = None if speed is None and number == 9 else 2.0 + number / 10
    return {
        "trial": f"t{number}", "values": values, "accept_length": length, "tokens_per_second": speed,
        "failure": None if length else "it failed",
    }  # fmt: skip


def test_figures_are_svg_whatever_the_knobs_are() -> None:
    knobs = ("drafter.loss.token", "drafter.loop.optimizer.lr", "drafter.shape.fc_norm", "drafter.x")
    turned: Any = (("ce", 1e-4, True, None), ("kl", 1e-2, False, 2), ("ce", 1e-2, False, [1]))
    values = [dict(zip(knobs, each, strict=True)) for each in turned]
    rows = [row(0, values[0], 100.0), row(1, values[1], 120.0), row(2, values[2], None), row(9, values[0], None)]
    report = {"config": {"knobs": dict.fromkeys(knobs)}, "trials": rows}
    for image in (knob_figure(report), trade_figure(report)):
        assert ET.fromstring(image).tag.endswith("svg")
    assert knob_figure(report) == knob_figure(report)
