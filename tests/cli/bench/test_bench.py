"""`eyas bench`: the table, the file, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ...pairs import Pair, write_rows

Run = Callable[..., Result]


@pytest.fixture
def bench(run: Run, pair: Pair, tmp_path: Path) -> Run:
    math = write_rows(tmp_path / "math.jsonl", [{"turns": ["48/2?", "and then?"]}, {"prompt": "clips"}])
    code = write_rows(tmp_path / "code.jsonl", [{"prompt": "def add"}])

    def call(*options: Any) -> Result:
        few = ("--max-new-tokens", 4, "--repeats", 2, "--warmup", 0)
        return run("bench", "--model", pair.model, "--prompt-file", math, "--prompt-file", code, *few, *options)

    return call


def test_plain_and_two_trees(bench: Run, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    trees = ("--tree", "chain:2", "--tree", "dynamic:2,3,5")
    result = bench("--draft-model", pair.drafter, *trees, "--batch-size", 2, "--output", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [(line["task"], line["method"]) for line in report["lines"]] == [
        (task, method) for task in ("math", "code", "mean") for method in ("none", "chain:2", "dynamic:2,3,5")
    ]
    for line in report["lines"]:
        assert line["same"] == line["answers"] == {"math": 3, "code": 1, "mean": 4}[line["task"]]
        # the file has four decimals: the table's two may have been rounded the other way
        assert any(f"{line['speedup'] + nudge:.2f}x" in result.stdout for nudge in (-5e-5, 5e-5))
    assert report["stats"]["math"]["none"]["tokens"] == report["stats"]["math"]["chain:2"]["tokens"]
    assert report["settings"]["repeats"] == 2
    assert report["settings"]["sampling"]["max_tokens"] == 4
    for words in ("dynamic:2,3,5", "3/3", "4/4", "efficiency: speedup / accept length"):
        assert words in result.stdout


def test_methods_are_named_as_for_generate(bench: Run, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    own = f"{pair.drafter.name}+suffix"
    methods = ("--method", "ngram", "--method", own, "--method", "eagle3")
    result = bench("--draft-model", pair.drafter, *methods, "--tree", "chain:2", "--output", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [line["method"] for line in report["lines"][:4]] == [
        "none",
        "ngram chain:2",
        f"{own} chain:2",
        "eagle3 chain:2",
    ]
    alone = bench("--method", "ngram", "--json")
    assert [line["method"] for line in json.loads(alone.stdout)["lines"]][:2] == ["none", "auto"]


def test_json_goes_to_standard_output(run: Run, pair: Pair, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    out = tmp_path / "report.json"
    result = run(
        *("bench", "--model", pair.model, "--prompt-file", file, "--max-new-tokens", 2, "--repeats", 1),
        *("--json", "-o", out),
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(out.read_text())


def test_plain_alone_and_bad_rows(run: Run, pair: Pair, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "x"}, {"prompt": ""}, {"token_ids": [9999]}])
    result = run("bench", "--model", pair.model, "--prompt-file", file, "--max-new-tokens", 2, "--repeats", 1)
    assert result.exit_code == 1
    assert "error: rows.jsonl:2" in result.stderr
    assert "error: rows.jsonl:3" in result.stderr
    assert "1/1" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            (options, "--tree, --coupled and how a drafter is loaded are about drafting: give --draft-model")
            for options in (("--tree", "chain:2"), ("--draft-window", "64"), ("--draft-quantize", "off"))
        ),
        (("--no-coupled",), "give --draft-model"),
        (("--method", "magic"), "unknown method 'magic'"),
        (("--method", "eagle3"), "--method eagle3 needs one drafter"),
        (("--draft-model", ".", "--method", "ngram"), "no --method uses"),
        (("--output", "no/such/place/report.json"), "there is no directory no/such/place"),
        (("--temperature", -1), "--temperature -1"),
        (("--repeats", 0), "--repeats"),
    ],
)
def test_what_is_refused_before_anything_runs(bench: Run, options: tuple[Any, ...], words: str) -> None:
    result = bench(*options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""
