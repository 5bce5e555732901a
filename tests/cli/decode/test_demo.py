"""`eyas demo` on the tiny pair."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result

from eyas.assets import PROMPTS
from eyas.tree import DraftTree, NodeLogits
from eyas.verify import Sampler, SeededWalk, Walk

from ...pairs import Pair, write_rows

Run = Callable[..., Result]


@pytest.fixture
def demo(run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The pair stands for SmolLM2 and its drafter; short prompts."""
    monkeypatch.setattr("eyas.assets._smollm2", lambda: str(pair.model))
    monkeypatch.setattr("eyas.assets.SMOLLM2_DRAFTER", pair.drafter)
    monkeypatch.setattr("eyas.assets.PROMPTS", (("math", "48/2?"), ("code", "def add"), ("math", "24?")))
    return lambda *arguments: run("demo", "--max-new-tokens", 8, "--tree", "chain:2", *arguments)


def test_json(demo: Run) -> None:
    result = demo("--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report) == ["rows", "settings", "machine"]
    assert [row["text"] for row in report["rows"]] == ["math", "code", "all"]
    for row in report["rows"]:
        assert row["identical_output"] is True
        assert row["accept_length"] >= 1.0
        plain, fast = row["plain_tokens_per_second"], row["speculative_tokens_per_second"]
        assert row["speedup"] == pytest.approx(fast / plain, rel=0.01)
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["accept_length"], abs=0.002)
    assert report["settings"]["max_new_tokens"] == 8
    assert report["settings"]["dtype"] == report["settings"]["weights"] == "float32"


def test_text(demo: Run) -> None:
    result = demo("--tree", "chain:2")
    assert result.exit_code == 0, result.output
    assert "it is tiny, and its answers below are often wrong" in result.stdout
    assert "[math] 48/2?" in result.stdout
    assert "[code] def add" in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.strip().startswith(("math ", "code ", "all "))]
    assert [line.split()[-1] for line in rows] == ["yes"] * 3
    assert "identical output: every token of both runs was compared" in result.stdout
    assert "DIFFERENT" not in result.stdout


def test_a_drawing_of_the_run(demo: Run, tmp_path: Path) -> None:
    """It stands alone: nothing in it is fetched from elsewhere."""
    result = demo("--svg", tmp_path / "demo.svg")
    assert result.exit_code == 0, result.output
    drawn = (tmp_path / "demo.svg").read_text()
    ElementTree.fromstring(drawn)
    for words in ("48/2?", "tokens/s", "speedup"):
        assert words in drawn.replace("&#160;", " ")
    assert "url(http" not in drawn.replace('"', "")
    assert "can't write" in demo("--svg", tmp_path / "demo.svg" / "below.svg").stderr


def test_figures_that_are_not_to_be_trusted_are_warned_of(demo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the other verbs that measure do: of a busy machine, and of speedups that can't be."""
    monkeypatch.setattr("eyas.runtime.busy", lambda _: "the machine was busy (load 9)")
    monkeypatch.setattr("eyas.bench.offline.candidates.MOST_EFFICIENT", 0.0)
    for options in ((), ("--json",)):
        said = demo(*options).stderr
        assert "warning: the machine was busy (load 9)" in said
        assert "warning: impossible: math, " in said


def test_own_model_prompts_and_file(run: Run, pair: Pair, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "own.jsonl", [{"prompt": "48/2?"}, {"prompt": "clips", "category": "sales"}])
    (tmp_path / "code.py").write_text("def add(a, b):\n    return a + b\n")
    few = ("--max-new-tokens", 8, "--tree", "chain:2")
    own = ("--prompt-file", prompts, "--edit", tmp_path / "code.py", "--change", "Rename add.")
    result = run("demo", pair.model, *own, *few)
    assert result.exit_code == 0, result.output
    for words in (
        "[own prompts] 48/2?",
        "[sales] clips",
        "[edit] Rename add. Write the whole file again",
        "return a + b",
    ):
        assert words in result.stdout
    assert "it is tiny, and its answers below are often wrong" not in result.stdout, (
        "that is about the model that comes with eyas"
    )
    report = json.loads(run("demo", pair.model, *own, *few, "--draft-model", pair.drafter, "--json").stdout)
    assert [row["text"] for row in report["rows"]] == ["own prompts", "sales", "edit", "all"]
    assert all(row["identical_output"] for row in report["rows"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--change", "Rename add."), "--change says what to change in a file: give --edit FILE"),
        (("--draft-model", "./gone"), "there is no ./gone"),
    ],
)
def test_what_is_refused(run: Run, pair: Pair, options: tuple[str, ...], words: str) -> None:
    refused = run("demo", pair.model, *options)
    assert refused.exit_code == 2
    assert words in refused.stderr


def test_bad_rows_and_files_are_named(run: Run, pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    assert "as text" in run("demo", pair.model, "--edit", tmp_path / "image.png").stderr
    rows = write_rows(tmp_path / "own.jsonl", [{"prompt": ""}])
    assert "own.jsonl:1" in run("demo", pair.model, "--prompt-file", rows).stderr


class Shifted:
    """A broken rule that claims to be lossless."""

    lossless = seeded = True

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        walk = SeededWalk()(logits, tree, sampler, rows)
        return walk if not tree.size else walk.replaced(tokens=walk.tokens.clamp(max=50))


def test_identical_is_computed(demo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.engine.SeededWalk", Shifted)
    result = demo("--json")
    assert result.exit_code == 1  # float32 promises every token
    assert [row["identical_output"] for row in json.loads(result.stdout)["rows"]] == [False] * 3
    text = demo().stdout
    assert "DIFFERENT" in text
    assert "eyas verify" in text


@pytest.mark.parametrize(
    ("option", "code", "message"),
    [(("--tree", "bush"), 2, "unknown tree 'bush'"), (("--dtype", "int8"), 2, "'int8' is not one of")],
)
def test_bad_options(demo: Run, option: tuple[str, str], code: int, message: str) -> None:
    result = demo(*option)
    assert result.exit_code == code
    assert message in result.stderr


def test_methods_race_on_the_same_texts(demo: Run) -> None:
    result = demo("--methods", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    names = list(dict.fromkeys(row["method"] for row in report["rows"]))
    assert names[:2] == ["plain", "eagle3"]
    assert "ngram" in names
    assert [row["text"] for row in report["rows"]] == ["math", "code", "all"] * len(names)
    for row in report["rows"]:
        assert row["identical_output"] is True
        assert (row["draft_share"] > 0) == (row["method"] != "plain")
        assert row["speedup"] > 0
        if row["method"] == "plain":
            assert (row["speedup"], row["accept_length"]) == (1.0, 1.0)
    assert "there is no drafter for them: " in result.stderr
    text = demo("--methods").stdout
    for name in names:
        assert re.search(rf"(?m)^ ?{re.escape(name)} ", text), "a row, however wide its figures are"
    assert "every token of all runs was compared" in text


def test_a_method_that_differs_is_shown(demo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.engine.SeededWalk", Shifted)
    result = demo("--methods", "--json")
    assert result.exit_code == 1
    wrong = {row["method"] for row in json.loads(result.stdout)["rows"] if not row["identical_output"]}
    assert "eagle3" in wrong
    assert "plain" not in wrong


def test_the_prompts_are_of_three_kinds() -> None:
    kinds: list[Any] = [kind for kind, _ in PROMPTS]
    assert set(kinds) == {"math", "code", "prose"}
    assert len(kinds) == len({text for _, text in PROMPTS})
