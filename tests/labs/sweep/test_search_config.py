"""What a sweep's file may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.config import load_config
from eyas.errors import ConfigError
from eyas.labs.sweep.search import SweepConfig

GOOD = """
recipe: recipe.yaml
output: runs
knobs:
  drafter.shape.layers: [1, 2]
"""


def load(folder: Path, text: str) -> SweepConfig:
    (folder / "sweep.yaml").write_text(text)
    return load_config(SweepConfig, folder / "sweep.yaml")


def test_lists_and_ranges(tmp_path: Path) -> None:
    config = load(
        tmp_path, GOOD + "  drafter.loop.optimizer.lr: {low: 1.0e-4, high: 1, log: true}\nsearch: tpe\ntrials: 4"
    )
    layers, rate = config.knobs.values()
    assert layers.values == (1, 2)
    assert (rate.bounds, rate.log, rate.whole) == ((1e-4, 1), True, False)


def test_the_command_line_changes_what_is_set_for_all_trials(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(GOOD + "set: {drafter.store: there, drafter.loop.epochs: 1}")
    config = load_config(SweepConfig, tmp_path / "sweep.yaml", ["set.drafter.store=here", "set.drafter.seed=3"])
    assert config.set == {"drafter.store": "here", "drafter.loop.epochs": 1, "drafter.seed": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  x: 3", r"knobs\.x: .*give a list of values, or a range such as"),
        ("  x: []", r"knobs\.x: .*the list is empty"),
        ("  x: {low: 2}", "needs both low and high"),
        ("  x: {low: 3, high: 2}", "low must be below high"),
        ("  x: {low: 0, high: 2, log: true}", "must begin above 0"),
        ("  x: {hgih: 3}", r"knobs\.x\.hgih: there is no such key"),
        ("  x: {low: 1, high: 3}", "search grid needs lists of values, but x is a range"),
        ("trials: 3", "search grid runs every combination"),
        ("search: random", "search random needs trials"),
        ("search: bayes", "search: Input should be 'grid', 'random' or 'tpe'"),
        ("set: {drafter.shape.layers: 2}", "in both set and knobs"),
        ("parallel: 2\ndevices: ['0']", "need as many devices"),
        ("score: {prompt_files: [none.jsonl]}", "none.jsonl is not a file"),
        ("knob: {}", "knob: there is no such key"),
    ],
)
def test_what_is_refused(text: str, words: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, GOOD + text)
