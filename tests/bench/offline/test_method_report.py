"""The arithmetic of a comparison of methods, and that tables, JSON and plot say the same."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from eyas.bench.offline.candidates import impossible
from eyas.bench.offline.methods import MethodChoice, OpenedMethod, Skipped
from eyas.bench.offline.report import COMPARISON, MethodComparison, Quartiles, compared, describe_training
from eyas.bench.offline.runner import MethodResult
from eyas.bench.report.figures import methods_figure
from eyas.types import Stats

ENGINE: Any = None


def measured(seconds: float, accepted: int, ratios: list[float], same: int = 2, drafting: float = 0.0) -> MethodResult:
    """The result of two prompts of 20 tokens that take equally long."""
    result = MethodResult(Stats(), same, 2, ratios=ratios)
    for _ in range(2):
        group = Stats(tokens=20, decode_seconds=seconds / 2, draft_seconds=drafting / 2)
        for _ in range(20 // (accepted + 1)):
            group.record(accepted, accepted, 9)
        result.groups.append(group)
        result.stats.merge(group)
    return result


Results = dict[tuple[float, str], dict[str, MethodResult]]


def results(same: int = 2, seconds: float = 2.1, noise: float = 0.0) -> Results:
    """`lookup` accepts one token a pass; plain decoding takes 4 seconds, with repeats that differ by `noise`."""
    made: Results = {}
    for heat in (0.0, 1.0):
        for task in ("math", "code"):
            plain = measured(4.0, 0, [1.0] * 4)
            plain.spreads = [noise, noise]
            lookup = measured(seconds, 1, [1.0, 2.0, 3.0, 4.0], same, drafting=0.5)
            made[heat, task] = {"none": plain, "lookup": lookup}
    return made


def comparison(same: int = 2, found: Results | None = None) -> MethodComparison:
    method = OpenedMethod(MethodChoice("lookup"), ENGINE, ENGINE, "chain:1", weights=2_000_000, cache=500_000)
    settings = {"model": "m", "dtype": "float32", "weights": "float32", "batch_size": 1, "temperatures": [0.0, 1.0]}
    return MethodComparison(
        [method], [Skipped("mtp", "no modules")], found or results(same), settings, {"cores": 2}, ["e"]
    )


def test_figures_have_margins_and_means_have_joint_ones() -> None:
    lines = {(one.temperature, one.line.task, one.line.method): one for one in compared(results(noise=0.1))}
    math, code, mean = (lines[0.0, task, "lookup"] for task in ("math", "code", "mean"))
    assert math.line.speedup == pytest.approx(4.0 / 2.1)
    assert (math.spread, math.pairs, math.draft_share) == (Quartiles(1.75, 3.25), 4, pytest.approx(0.5 / 2.1))
    alone = math.line.margins["speedup"]
    assert alone == pytest.approx(2 * 0.1 / 2**0.5 * 4.0 / 2.1, rel=1e-4), "the noise of two prompts' repeats"
    assert math.line.margins["accept_length"] == 0.0
    assert code.line.margins == math.line.margins
    assert mean.line.margins["speedup"] == pytest.approx((alone or 0.0) / 2**0.5)
    assert (mean.spread, mean.pairs) == (None, 8)
    plain = lines[1.0, "math", "none"]
    assert (plain.line.speedup, plain.line.margins, plain.spread, plain.pairs) == (1.0, {}, None, 0)
    assert Quartiles.of([1.0]) is None


def test_the_fastest_is_served_with_the_tree_that_was_measured() -> None:
    found = comparison()
    assert (found.fastest.name, found.fastest.faster) == ("lookup", True)
    assert found.verdict == (
        "Fastest: lookup, 1.90 times as fast as plain decoding on these prompts (give or take 0.00, two standard "
        "errors)."
    )
    ours = replace(found.methods[0], choice=MethodChoice("lookup", "runs/pick", "+suffix"))
    served = ["--draft-model", "runs/pick", "--method", "+suffix", "--tree", "chain:1"]
    assert replace(found, methods=[ours]).serve_options == served


@pytest.mark.parametrize("seconds", [5.0, 4.0])
def test_plain_decoding_may_be_the_fastest(seconds: float) -> None:
    plain = comparison(found=results(seconds=seconds))
    assert (plain.fastest.name, plain.serve_options) == ("none", [])
    assert "serve without one" in plain.verdict


def test_where_the_margin_leaves_it_open_the_method_with_auto_is_served() -> None:
    """A tree of one size would go on drafting if it doesn't pay; `auto` stops."""
    unsure = comparison(found=results(noise=0.9))
    assert (unsure.fastest.name, unsure.fastest.faster) == ("lookup", None)
    assert unsure.verdict.startswith("No method is certain to be faster than plain decoding here. The best measured: ")
    assert "until then, serve without a drafter." in unsure.verdict
    assert unsure.serve_options == []
    auto = OpenedMethod(MethodChoice("lookup auto", method="lookup", tree="auto"), ENGINE, ENGINE, "auto", weights=1)
    both = {key: {**each, "lookup auto": measured(2.5, 1, [])} for key, each in results(noise=0.9).items()}
    beside = replace(unsure, methods=[*unsure.methods, auto], results=both)
    assert beside.fastest.name == "lookup"
    assert beside.serve_options == ["--method", "lookup", "--tree", "auto"]
    assert "until then, lookup auto drafts only where that pays" in beside.verdict


def test_a_speedup_above_the_accept_length_is_called_impossible_and_never_recommended() -> None:
    wrong = comparison(found=results(seconds=1.0))
    lines = {one.line.task: one.line for one in wrong.lines if one.line.method == "lookup"}
    assert (lines["math"].efficiency, lines["mean"].impossible) == (2.0, None)
    assert str(lines["math"].impossible).startswith("impossible: lookup on math, 4.00x at accept length 2.00")
    assert impossible("x", 7.47, 2.28) is not None
    assert impossible("x", 2.3, 2.28) is None
    assert (wrong.fastest.name, wrong.to_serve, wrong.serve_options) == ("none", None, [])
    assert "lookup isn't ranked: impossible: lookup on math" in wrong.verdict
    assert wrong.as_dict()["impossible"] == ["lookup"]
    console = Console(width=200, record=True, file=StringIO())
    console.print(wrong.table("title"))
    assert "2.00 ?" in console.export_text()


def test_the_tables_and_the_json_say_the_same() -> None:
    found = comparison()
    console = Console(width=200, record=True, file=StringIO())
    console.print(found.table("title"))
    console.print(found.costs())
    text = console.export_text()
    for words in ("lookup", "1.90x ±0.00", "2.00 ±0.00", "24%", "2/2", "chain:1", "2.0", "0.5"):
        assert words in text
    report = json.loads(json.dumps(found.as_dict()))
    assert list(report) == [
        "machine", "settings", "definitions", "methods", "skipped", "lines", "samples", "stats", "equality", "fastest",
        "certain", "impossible", "verdict", "serve", "errors",
    ]  # fmt: skip
    line = report["lines"][1]
    assert (line["method"], line["temperature"], line["speedup_quartiles"]) == ("lookup", 0.0, [1.75, 3.25])
    assert line["margins"].keys() == {"speedup", "accept_length", "tokens_per_second"}
    assert "ttft_ms" not in line
    assert report["skipped"] == [{"name": "mtp", "reason": "no modules"}]
    assert report["stats"][1]["ratios"] == [1.0, 2.0, 3.0, 4.0]


def test_answers_that_differ_are_named() -> None:
    assert comparison().equality.startswith("Every answer of every method is plain decoding's")
    assert comparison(same=1).equality == (
        "NOT all answers are plain decoding's: lookup at T=0 on math (1 of 2), lookup at T=0 on code (1 of 2), "
        "lookup at T=1 on math (1 of 2), lookup at T=1 on code (1 of 2)."
    )


def test_every_figure_is_defined_once() -> None:
    for figure in ("speedup", "tokens/s", "accept length", "efficiency", "drafting", "by position", "identical"):
        assert sum(line.startswith(f"{figure}:") for line in COMPARISON) == 1, figure


def test_training_in_words() -> None:
    assert describe_training({"steps": 1500, "seconds": 2146.3}) == "1500 steps, 36 min"
    assert describe_training({"rows": 3}) == describe_training(None) == ""


def test_the_plot_draws_what_the_table_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.bench.report import figures

    drawn: list[tuple[str, list[float]]] = []
    real = figures._bars

    def bars(axes: Any, lines: Any, name: str, number: int, tasks: Any) -> None:
        drawn.append((f"{tasks[number]} {name}", [line[name] for line in lines]))
        real(axes, lines, name, number, tasks)

    monkeypatch.setattr(figures, "_bars", bars)
    assert methods_figure(comparison().as_dict()).startswith(b"<?xml")
    assert ("math speedup", [1.9048]) in drawn
    assert ("mean accept_length", [2.0]) in drawn
    assert len(drawn) == 2 * 3 * 2
