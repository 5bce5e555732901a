"""The arithmetic of the report."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from eyas.bench.machine import describe_machine
from eyas.bench.offline.report import DEFINITIONS, MethodLine, document, line_dict, lines_of, means, table_of
from eyas.bench.offline.runner import MethodResult
from eyas.types import Stats


def measured(
    tokens: int, seconds: float, rounds: list[tuple[int, int]], same: int = 2, context: int = 5
) -> MethodResult:
    stats = Stats(tokens=tokens, decode_seconds=seconds, prefill_seconds=0.25)
    for accepted, offered in rounds:
        stats.record(accepted, offered, context)
    return MethodResult(stats, same, 2)


RESULTS = {
    "none": measured(40, 4.0, [(0, 0)] * 40),
    "chain:2": measured(40, 2.0, [(2, 2), (1, 2), (0, 2), (1, 2)], same=1),
}


def test_figures_are_those_defined() -> None:
    plain, chain = lines_of("math", RESULTS)
    assert (plain.tokens_per_second, plain.speedup, plain.accept_length, plain.efficiency) == (10.0, 1.0, 1.0, None)
    assert (chain.tokens_per_second, chain.speedup, chain.accept_length) == (20.0, 2.0, 2.0)
    assert chain.efficiency == 1.0
    assert chain.by_position == [0.75, 0.25]
    assert (chain.same, chain.answers, chain.prefill_seconds) == (1, 2, 0.25)


def test_means_are_over_files() -> None:
    slower = {**RESULTS, "chain:2": measured(40, 8.0, [(0, 1)])}
    lines = [*lines_of("math", RESULTS), *lines_of("code", slower)]
    plain, chain = means(lines)
    assert [line.task for line in (plain, chain)] == ["mean", "mean"]
    assert chain.speedup == pytest.approx((2.0 + 0.5) / 2)
    assert chain.accept_length == pytest.approx((2.0 + 1.0) / 2)
    assert chain.tokens_per_second == pytest.approx((20.0 + 5.0) / 2)
    assert chain.by_position == [pytest.approx((0.75 + 0.0) / 2)]  # as deep as every file reached
    assert (chain.same, chain.answers) == (3, 4)
    assert means(lines[:2]) == []  # one file is its own mean


def test_accept_length_by_context() -> None:
    """The column is there when rounds had contexts of several ranges; a mean has the ranges that all files have."""
    both = measured(8, 1.0, [(2, 2), (1, 2)])
    both.stats.merge(measured(4, 1.0, [(0, 2), (1, 2)], context=1024).stats)
    lines = [*lines_of("long", {"none": both}), *lines_of("short", {"none": measured(4, 1.0, [(1, 2)], context=1023)})]
    assert [line_dict(line)["by_context"] for line in lines] == [{"0-1k": 2.5, "1-2k": 1.5}, {"0-1k": 2.0}]
    assert means(lines)[0].by_context == {"0-1k": 2.25}
    for shown, several in ((lines, True), (lines[1:], False)):
        console = Console(width=200, record=True, file=StringIO())
        console.print(table_of(shown, "title"))
        text = console.export_text()
        assert ("by context" in text, "0-1k: 2.50 1-2k: 1.50" in text) == (several, several)


def test_a_file_without_answers_divides_by_nothing() -> None:
    (line,) = lines_of("empty", {"none": MethodResult()})
    assert (line.tokens_per_second, line.speedup) == (0.0, 0.0)
    assert MethodLine("t", "chain:1", 0.0, 0.0, 0.0, 0.0, [], 0, 0).efficiency is None


def test_the_table_and_the_json_say_the_same() -> None:
    console = Console(width=200, record=True, file=StringIO())
    console.print(table_of(lines_of("math", RESULTS), "title"))
    text = console.export_text()
    for words in ("chain:2", "20.0", "2.00x", "1.00", "0.75 0.25", "1/2", "2/2"):
        assert words in text
    counts = {"math": {name: one.stats.as_dict() for name, one in RESULTS.items()}}
    report = document(describe_machine(), {"model": "m"}, DEFINITIONS, lines_of("math", RESULTS), counts, ["f:1: bad"])
    assert list(json.loads(json.dumps(report))) == ["machine", "settings", "definitions", "lines", "stats", "errors"]
    assert report["lines"][1] == line_dict(lines_of("math", RESULTS)[1])
    assert report["lines"][1]["efficiency"] == 1.0
    assert report["stats"]["math"]["chain:2"]["accepted_histogram"] == [1, 2, 1]
    assert report["machine"]["cores"] >= 1


def test_every_figure_is_defined() -> None:
    for figure in (
        "tokens/s",
        "speedup",
        "accept length",
        "efficiency",
        "by position",
        "by context",
        "identical",
        "mean",
    ):
        assert any(definition.startswith(f"{figure}:") for definition in DEFINITIONS), figure
