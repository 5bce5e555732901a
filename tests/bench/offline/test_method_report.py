"""The arithmetic of a comparison of methods, and that tables, JSON and plot say the same."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from eyas.bench.offline.methods import MethodChoice, OpenedMethod, Skipped
from eyas.bench.offline.report import COMPARISON, MethodComparison, Quartiles, compared, impossible, training_words
from eyas.bench.offline.runner import MethodResult
from eyas.bench.report.figures import methods_figure
from eyas.types import Stats

ENGINE: Any = None


def measured(seconds: float, accepted: int, ratios: list[float], same: int = 2, drafting: float = 0.0) -> MethodResult:
    stats = Stats(tokens=40, decode_seconds=seconds, draft_seconds=drafting)
    for _ in range(40 // (accepted + 1)):
        stats.record(accepted, accepted, 9)
    return MethodResult(stats, same, 2, ratios=ratios)


def results(same: int = 2) -> dict[tuple[float, str], dict[str, MethodResult]]:
    return {
        (heat, task): {
            "none": measured(4.0, 0, [1.0] * 4),
            "lookup": measured(2.0, 1, [1.0, 2.0, 3.0, scale * 4.0], same, drafting=0.5),
        }
        for heat in (0.0, 1.0)
        for task, scale in (("maths", 1.0), ("code", 10.0))
    }


def believable() -> dict[tuple[float, str], dict[str, MethodResult]]:
    """Without speedups above the accept length."""
    return {key: {**each, "lookup": measured(2.0, 1, [1.5, 1.6])} for key, each in results().items()}


def comparison(same: int = 2) -> MethodComparison:
    method = OpenedMethod(MethodChoice("lookup"), ENGINE, ENGINE, "chain:1", weights=2_000_000, cache=500_000)
    settings = {"model": "m", "dtype": "float32", "weights": "float32", "batch_size": 1, "temperatures": [0.0, 1.0]}
    return MethodComparison([method], [Skipped("mtp", "no modules")], results(same), settings, {"cores": 2}, ["e"])


def test_speedup_is_the_median_of_paired_ratios_with_quartiles() -> None:
    lines = {(one.temperature, one.line.task, one.line.method): one for one in compared(results())}
    maths, code, mean = (lines[0.0, task, "lookup"] for task in ("maths", "code", "mean"))
    assert (maths.line.speedup, maths.spread, maths.pairs) == (2.5, Quartiles(1.75, 3.25), 4)
    assert (code.line.speedup, code.line.efficiency) == (2.5, 1.25)  # an outlier moves neither
    assert maths.draft_share == 0.25
    assert (mean.line.speedup, mean.spread, mean.pairs, mean.draft_share) == (2.5, None, 8, 0.25)
    plain = lines[1.0, "maths", "none"]
    assert (plain.line.speedup, plain.spread, plain.pairs, plain.draft_share) == (1.0, None, 0, 0.0)
    assert Quartiles.of([1.0]) is None


def test_the_fastest_is_served_and_that_may_be_plain_decoding() -> None:
    found = comparison()
    assert (found.fastest, found.fastest_options) == (("lookup", 2.5), [])
    assert found.verdict.startswith(
        "Fastest: lookup, 2.50 times as fast as plain decoding on these prompts. That can't"
    )
    believed = "Fastest: lookup, 1.55 times as fast as plain decoding on these prompts."
    assert replace(found, results=believable()).verdict == believed
    ours = replace(found.methods[0], choice=MethodChoice("lookup", "runs/pick", "+suffix"))
    assert replace(found, methods=[ours]).fastest_options == ["--draft-model", "runs/pick", "--method", "+suffix"]
    slower = {key: {**each, "lookup": measured(5.0, 1, [0.8])} for key, each in results().items()}
    plain = replace(found, results=slower)
    assert (plain.fastest, plain.fastest_options) == (("none", 1.0), [])
    assert "serve without one" in plain.verdict
    lucky = {key: {**each, "lookup": measured(3.0, 0, [1.3])} for key, each in results().items()}
    assert replace(found, results=lucky).fastest[0] == "none", "at accept length 1 nothing is faster"


@pytest.mark.parametrize("ratios", [[0.9, 0.95, 1.3, 1.4], [2.0]])
def test_a_method_that_may_be_no_faster_is_called_uncertain(ratios: list[float]) -> None:
    """On one file is enough; a single run tells nothing about the next."""
    found = comparison()
    assert found.certain
    unsure = {key: {**each, "lookup": measured(2.0, 1, ratios)} for key, each in results().items() if key[1] == "maths"}
    doubtful = replace(found, results=believable() | unsure)
    assert doubtful.fastest[0] == "lookup"
    assert not doubtful.certain
    assert "That isn't certain" in doubtful.verdict
    assert "`eyas serve` drafts only where that pays" in doubtful.verdict


def test_a_speedup_above_the_accept_length_is_called_impossible() -> None:
    lines = {one.line.task: one.line for one in comparison().lines if one.line.method == "lookup"}
    assert (lines["maths"].efficiency, lines["mean"].impossible) == (1.25, None)
    assert str(lines["maths"].impossible).startswith("impossible: lookup on maths, 2.50x at accept length 2.00")
    assert impossible("x", 7.47, 2.28) is not None
    assert impossible("x", 2.3, 2.28) is None
    console = Console(width=200, record=True, file=StringIO())
    console.print(comparison().table("title"))
    assert "1.25 ?" in console.export_text()


def test_the_tables_and_the_json_say_the_same() -> None:
    found = comparison()
    console = Console(width=200, record=True, file=StringIO())
    console.print(found.table("title"))
    console.print(found.costs())
    text = console.export_text()
    for words in ("lookup", "2.50x", "1.75-3.25", "25%", "2/2", "chain:1", "2.0", "0.5"):
        assert words in text
    report = json.loads(json.dumps(found.as_dict()))
    assert list(report) == [
        "machine", "settings", "definitions", "methods", "skipped", "lines", "samples", "stats", "equality", "fastest",
        "verdict", "serve", "errors",
    ]  # fmt: skip
    line = report["lines"][1]
    assert (line["method"], line["temperature"], line["speedup_quartiles"]) == ("lookup", 0.0, [1.75, 3.25])
    assert "ttft_ms" not in line
    assert report["skipped"] == [{"name": "mtp", "reason": "no modules"}]
    assert report["stats"][1]["ratios"] == [1.0, 2.0, 3.0, 4.0]


def test_answers_that_differ_are_named() -> None:
    assert comparison().equality.startswith("Every answer of every method is plain decoding's")
    assert comparison(same=1).equality == (
        "NOT all answers are plain decoding's: lookup at T=0 on maths (1 of 2), lookup at T=0 on code (1 of 2), "
        "lookup at T=1 on maths (1 of 2), lookup at T=1 on code (1 of 2)."
    )


def test_every_figure_is_defined_once() -> None:
    for figure in ("speedup", "tokens/s", "accept length", "efficiency", "drafting", "by position", "identical"):
        assert sum(line.startswith(f"{figure}:") for line in COMPARISON) == 1, figure


def test_training_in_words() -> None:
    assert training_words({"steps": 1500, "seconds": 2146.3}) == "1500 steps, 36 min"
    assert training_words({"rows": 3}) == training_words(None) == ""


def test_the_plot_draws_what_the_table_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.bench.report import figures

    drawn: list[tuple[str, list[float]]] = []
    real = figures._bars

    def bars(axes: Any, lines: Any, name: str, number: int, tasks: Any) -> None:
        drawn.append((f"{tasks[number]} {name}", [line[name] for line in lines]))
        real(axes, lines, name, number, tasks)

    monkeypatch.setattr(figures, "_bars", bars)
    assert methods_figure(comparison().as_dict()).startswith(b"<?xml")
    assert ("maths speedup", [2.5]) in drawn
    assert ("mean accept_length", [2.0]) in drawn
    assert len(drawn) == 2 * 3 * 2
