"""`eyas bench methods`: table, JSON, plot, what can't run, and what is refused."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eyas.cli.common.aliases import in_options
from eyas.drafters.weightless import METHODS as WEIGHTLESS

from ...pairs import Pair, save_drafter, write_rows

Run = Callable[..., Result]


@pytest.fixture
def bench(run: Run, pair: Pair, tmp_path: Path) -> Run:
    math = write_rows(tmp_path / "math.jsonl", [{"prompt": "48/2? 48/2? 48/2?"}, {"prompt": "clips"}])
    code = write_rows(tmp_path / "code.jsonl", [{"prompt": "def add"}])

    def call(*options: Any) -> Result:
        files = ("--prompt-file", math, "--prompt-file", code)
        few = ("--max-new-tokens", 6, "--repeats", 2, "--warmup", 0)
        return run("bench", "methods", pair.model, *files, *few, *options)

    return call


def test_figures_of_every_method(bench: Run, pair: Pair, tmp_path: Path) -> None:
    out, plot = tmp_path / "m.json", tmp_path / "m.svg"
    drafter = ("--draft-model", f"eagle3={pair.drafter}", "--tree", "eagle3=chain:2", "--tree", "ngram=chain:10")
    methods = ("--method", "eagle3", "--method", "ngram")
    result = bench(*drafter, *methods, "--temperature", "0,1", "--output", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert [(line["task"], line["temperature"], line["method"]) for line in report["lines"]] == [
        (task, heat, method)
        for heat in (0, 1)
        for task in ("math", "code", "mean")
        for method in ("none", "eagle3", "ngram")
    ]
    for line in report["lines"]:
        answers = {"math": 2, "code": 1, "mean": 3}[line["task"]]
        assert line["same"] == line["answers"] == answers
        assert line["pairs"] == (0 if line["method"] == "none" else 2 * answers)
        if line["method"] == "none":
            assert (line["speedup"], line["accept_length"], line["draft_share"]) == (1.0, 1.0, 0.0)
        elif line["task"] != "mean":
            least, most = line["speedup_quartiles"]
            assert least <= most
            assert 0 < line["draft_share"] < 1
            assert line["efficiency"] == pytest.approx(line["speedup"] / line["accept_length"], abs=2e-3)
    eagle, ngram = report["methods"]
    assert (eagle["method"], eagle["drafter"], eagle["tree"]) == ("eagle3", pair.drafter.name, "chain:2")
    assert (ngram["method"], ngram["drafter"], ngram["tree"]) == ("ngram", None, "chain:10")
    assert eagle["weights_bytes"] > 100 * ngram["weights_bytes"]
    assert eagle["cache_bytes"] > 0 < ngram["cache_bytes"]
    assert eagle["training"] is None
    assert report["equality"] in result.stdout
    assert report["equality"].startswith("Every answer of every method is plain decoding's")
    assert report["settings"]["temperatures"] == [0, 1]
    assert {row["method"] for row in report["stats"]} == {"none", "eagle3", "ngram"}
    assert plot.read_bytes().startswith(b"<?xml")
    assert report["fastest"] in ("none", "eagle3", "ngram")
    assert "Fastest: " in result.stdout or "margins" in result.stdout  # where no method is surely the fastest
    comes_next = result.stderr.splitlines()[-1]
    if report["impossible"]:  # timings of tiny models
        assert comes_next.startswith(f"next: eyas bench methods {pair.model} --method eagle3 --method ngram")
        assert comes_next.endswith("--repeats 4")
    else:
        assert comes_next == f"next: {shlex.join(['eyas', 'serve', str(pair.model), *report['serve']])}"
    for words in ("drafting", "±", "chain:2", "weights, MB", "2/2", "3/3"):
        assert words in result.stdout


def test_every_method_is_measured_with_auto_too(bench: Run, pair: Pair) -> None:
    result = bench("--draft-model", f"mine={pair.drafter}", "--method", "mine", "--method", "ngram", "--json")
    assert result.exit_code == 0, result.output
    trees = {one["method"]: one["tree"] for one in json.loads(result.stdout)["methods"]}
    assert trees == {"mine": "chain:4", "mine auto": "auto", "ngram": "chain:10", "ngram auto": "auto"}


def test_what_cannot_run_is_said_first_and_the_rest_is_measured(bench: Run, pair: Pair, tmp_path: Path) -> None:
    other = save_drafter(tmp_path / "wide", vocab_size=512)
    drafters = ("--draft-model", f"eagle3={pair.drafter}", "--draft-model", f"strange={other}")
    result = bench(*drafters, "--json", "--tree", "chain:2", "--repeats", 1)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    reasons = {one["name"]: one["reason"] for one in report["skipped"]}
    assert "the drafter" in reasons["strange"]
    assert "does not fit the target" in reasons["strange"]
    assert reasons.keys() <= {"strange", "strange+suffix", "mtp", "lookahead"}
    assert "not compared, because no drafter of the kind is given (--draft-model): dflash, " in result.stderr
    assert "cascade" not in result.stderr
    for name, reason in reasons.items():
        assert f"can't run {name}: {in_options(reason)}\n" in result.stderr
    measured = {one["method"] for one in report["methods"]}
    every = {"eagle3", "eagle3+suffix", *WEIGHTLESS}
    assert every == {name.removesuffix(" auto") for name in measured} | (reasons.keys() & every)
    assert "mtp" in reasons


def test_the_preset_takes_each_method_with_its_papers_tree(bench: Run, pair: Pair, tmp_path: Path) -> None:
    wide = save_drafter(tmp_path / "eagle1", draft_vocab_size=200)  # a network that stands for EAGLE-1's
    drafters = ("--draft-model", f"eagle3={pair.drafter}", "--draft-model", f"eagle1={wide}")
    result = bench("--preset", "seeds", *drafters, "--json", "--repeats", 1)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    trees = {one["method"]: (one["drafter"], one["tree"]) for one in report["methods"]}
    assert trees["eagle1"] == ("eagle1", "static:eagle1")
    assert trees["eagle2"] == ("eagle1", "dynamic:6,10,59")
    assert trees["eagle3"] == (pair.drafter.name, "dynamic:6,10,59")
    skipped = {one["name"] for one in report["skipped"]}
    assert trees.keys() | skipped == {"speculative", "mtp", "medusa", "lookahead", "eagle1", "eagle2", "eagle3"}
    assert "speculative" in skipped
    assert all(line["same"] == line["answers"] for line in report["lines"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", "-1"), "--temperature -1: a temperature is a number, at least 0"),
        (("--temperature", "0,hot"), "--temperature '0,hot': write numbers with commas between them"),
        (("--method", "magic"), "unknown method 'magic': write "),
        (("--method", "eagle3"), "--method eagle3 needs one drafter: give --draft-model eagle3=PATH"),
        (("--preset", "seeds", "--method", "ngram"), "--preset seeds says which methods: leave out --method"),
        (("--preset", "seeds", "--tree", "ngram=chain:2"), "--tree ngram=...: no method of that name is measured"),
        (("--draft-model", "=x"), "--draft-model =x: write NAME=PATH, or the path alone"),
        (("--draft-model", "a/b", "--draft-model", "c/b"), "two drafters have the same name"),
        (("--tree", "bush"), "unknown tree 'bush'"),
        (("--plot", "m.gif"), "plots are written as .svg"),
        (("--output", "no/where.json"), "there is no directory no"),
        (("--draft-model", "mine=.", "--method", "ngram"), "--draft-model .: no --method uses mine"),
        (("--draft-model", "mine=.", "--preset", "seeds"), "no method of the preset seeds uses mine"),
    ],
)
def test_what_is_refused_before_anything_runs(bench: Run, options: tuple[str, ...], words: str) -> None:
    result = bench(*options)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("more", [(), ("--method", "mine"), ("--method", "ngram"), ("--preset", "seeds")])
def test_a_drafter_that_is_not_there_is_never_dropped(bench: Run, tmp_path: Path, more: tuple[str, ...]) -> None:
    result = bench(*more, "--draft-model", f"mine={tmp_path / 'gone'}")
    assert result.exit_code == 2
    assert f"there is no {tmp_path / 'gone'}" in result.stderr
    assert result.stdout == ""


def test_nothing_to_compare_is_said(bench: Run, tmp_path: Path) -> None:
    other = save_drafter(tmp_path / "wide", vocab_size=512)
    result = bench("--method", "mine", "--draft-model", f"mine={other}")
    assert result.exit_code == 2
    assert "can't run mine: " in result.stderr
    assert "none of these methods can run here" in result.stderr
