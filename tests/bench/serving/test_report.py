"""Figures of a serving benchmark, from answers written by hand."""

from __future__ import annotations

import json

import pytest

from eyas.bench.report.figures import serve_figure
from eyas.bench.serving.client import Load, LoadRun, TimedAnswer
from eyas.bench.serving.report import COLUMNS, ServeReport, lines_of, markdown_of
from eyas.bench.serving.servers import SpeculationCounts

ONE = Load("closed", 1)
FOUR = Load("closed", 4)
NINE = Load("closed", 9)


def run(seconds: float, *texts: str, **more: float) -> LoadRun:
    """Ten tokens per answer; first text after a tenth of the time. An empty text is an error."""
    answers = [
        TimedAnswer(i, 0.0, seconds, seconds / 10, 10, 3, text, more.get("passes", 0.0), more.get("kept", 0.0))
        if text
        else TimedAnswer(i, 0.0, seconds, error="429: full")
        for i, text in enumerate(texts)
    ]
    return LoadRun(seconds, answers, SpeculationCounts(more.get("drafts", 0.0), 0.0, more.get("accepted", 0.0)))


def report(results: dict[Load, dict[str, list[LoadRun]]]) -> ServeReport:
    return ServeReport("plain", lines_of(results, "plain"))


def test_ratios_are_taken_within_repeats() -> None:
    made = report({ONE: {"plain": [run(2, "a", "b"), run(4, "a", "b")], "auto": [run(1, "a", "b"), run(8, "a", "x")]}})
    plain, auto = made.lines
    assert plain.tokens_per_second == [10.0, 5.0]
    assert plain.ratios == [1.0, 1.0]
    assert auto.ratios == [2.0, 0.5]
    content = auto.as_dict()
    assert (content["ratio_median"], content["ratio_least"]) == (1.25, 0.5)
    assert (auto.same, auto.compared) == (3, 4)


def test_an_open_loop_compares_how_long_answers_take() -> None:
    load = Load("open", 2.0)
    auto = report({load: {"plain": [run(3, "a")], "auto": [run(2, "a")]}}).lines[1]
    assert auto.ratios == [1.5]


def test_latencies_are_quantiles_of_good_answers() -> None:
    line = report({ONE: {"plain": [run(1, "a", ""), run(3, "a")]}}).lines[0]
    assert line.e2e == {"p50": 2000.0, "p90": 2800.0, "p99": 2980.0}
    assert line.ttft["p50"] == 200.0
    assert line.tpot["p50"] == 200.0  # (1 - 0.1) / 9 and (3 - 0.3) / 9 seconds
    assert (line.answers, line.errors) == (2, {"429: full": 1})
    assert report({ONE: {"plain": [run(1, "")]}}).lines[0].ttft == {}


def test_accept_length_from_passes_else_from_counters() -> None:
    by_passes = report({ONE: {"plain": [run(1, "a", "b", passes=4.0, kept=6.0, drafts=1.0)]}}).lines[0]
    by_counters = report({ONE: {"plain": [run(1, "a", drafts=4.0, accepted=6.0)]}}).lines[0]
    assert (by_passes.accept_length, by_counters.accept_length) == (2.5, 2.5)
    assert report({ONE: {"plain": [run(1, "a")]}}).lines[0].accept_length is None


@pytest.mark.parametrize(
    ("seconds", "crossover", "said"),
    [
        ([1, 1, 1], None, "no crossover: auto is not slower than plain at 9 at once"),
        ([1, 3, 1], None, "no crossover: auto is not slower than plain at 9 at once, but slower at 4 at once"),
        ([1, 3, 3], 4, "auto is slower than plain from 4 at once on"),
        ([3, 1, 3], 9, "auto is slower than plain from 9 at once on"),
    ],
)
def test_the_crossover_is_where_it_stays_slower(seconds: list[float], crossover: float | None, said: str) -> None:
    made = report(
        {
            load: {"plain": [run(2, "a")], "auto": [run(second, "a")]}
            for load, second in zip((ONE, FOUR, NINE), seconds, strict=True)
        }
    )
    assert made.as_dict()["crossover"] == {"auto": crossover}
    assert made.verdicts() == [said]


def test_json_table_and_figure() -> None:
    made = report(
        {
            load: {"plain": [run(2, "a")], "auto": [run(3, "a", passes=5.0)], "gone": [run(3, "")]}
            for load in (ONE, FOUR)
        }
    )
    content = json.loads(json.dumps(made.as_dict()))
    assert [line["side"] for line in content["lines"]] == ["plain", "auto", "gone"] * 2
    rows = markdown_of(made).splitlines()
    assert len(rows) == 2 + 6
    assert {row.count("|") for row in rows} == {len(COLUMNS) + 1}
    assert "0.67x" in rows[3]
    assert made.errors() == ["gone, 1 at once: 1 times 429: full", "gone, 4 at once: 1 times 429: full"]
    assert serve_figure(content).startswith(b"<?xml")
