"""`eyas bench trees`: table, files, and when config.json is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eyas.bench.offline import candidates

from ...pairs import Pair, write_rows

Run = Callable[..., Result]
pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.fixture
def drafter(pair: Pair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair.drafter, tmp_path / "drafter"))


@pytest.fixture
def bench(run: Run, pair: Pair, drafter: Path, tmp_path: Path) -> Run:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": text} for text in ("48/2?", "clips", "def")])

    def call(*options: Any) -> Result:
        few = ("--max-new-tokens", 6, "--repeats", 1, "--warmup", 0, "--coarse", 1, "--finalists", 2)
        sizes = ("--tree-depth", "2,3", "--tree-top-k", "2", "--tree-nodes", "3,4", "--chain", "2")
        pair_options = ("--model", pair.model, "--draft-model", drafter)
        return run("bench", "trees", *pair_options, "--prompt-file", rows, *few, *sizes, *options)

    return call


def test_the_best_tree_is_written_only_if_asked(
    bench: Run, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (drafter / "config.json").read_bytes()
    result = bench("--output", tmp_path / "t.json", "--plot", tmp_path / "t.svg")
    assert result.exit_code == 0, result.output
    assert (drafter / "config.json").read_bytes() == before
    report = json.loads((tmp_path / "t.json").read_text())
    assert [(done["prompts"], len(done["candidates"])) for done in report["passes"]] == [(1, 5), (3, 2)]
    speeds = {row["name"]: row["mean"]["tokens_per_second"] for row in report["passes"][-1]["candidates"]}
    assert report["pick"] == max(speeds, key=lambda name: speeds[name])
    for name in ("chain:2", "dynamic:2,2,3", "dynamic:2,2,4", "dynamic:3,2,3", "dynamic:3,2,4"):
        assert name in result.stdout
    assert (tmp_path / "t.svg").read_bytes().startswith(b"<?xml")

    monkeypatch.setattr(candidates, "doubt", lambda _: None)
    result = bench("--write", "--by", "accept_length")
    config = json.loads((drafter / "config.json").read_text())
    assert f"is now {config['default_tree']}" in result.stderr
    assert f"Pick: {config['default_tree']}" in result.stdout
    assert config == json.loads(before) | {"default_tree": config["default_tree"]}


def test_a_tree_that_may_be_slower_than_plain_does_not_become_the_drafters_own(
    bench: Run, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` does, which drafts only where that pays, whoever uses the drafter."""
    monkeypatch.setattr(candidates, "doubt", lambda picked: f"{picked.name} decodes at 0.90 times the speed")
    result = bench("--write")
    assert result.exit_code == 0
    assert "decodes at 0.90 times the speed. It can still be used with --tree auto" in result.stderr
    assert json.loads((drafter / "config.json").read_text())["default_tree"] == "auto"
    assert f"default_tree of {drafter} is now auto" in result.stderr
    assert f"--draft-model {drafter} --prompt-file" in result.stderr.split("next: eyas bench methods")[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tree-depth", "3,x"), "--tree-depth '3,x': write whole numbers"),
        (("--chain", "0"), "--chain '0'"),
        (("--tree-nodes", "100", "--chain", ""), "no tree to try"),
        (("--plot", "t.gif"), "plots are written as .svg"),
        (("--output", "no/where.json"), "there is no directory no"),
        (("--tree-top-k", "150"), "150 children, the drafter can offer 120"),
        (("--draft-model", "some/id", "--write"), "--write changes config.json of a local directory"),
    ],
)
def test_what_is_refused(bench: Run, options: tuple[Any, ...], words: str) -> None:
    more = ("--tree-nodes", "150") if "--tree-top-k" in options else ()
    result = bench(*options, *more)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == ""
