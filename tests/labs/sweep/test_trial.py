"""From values to recipes."""

from __future__ import annotations

import pytest
import yaml

from eyas.errors import ConfigError
from eyas.labs.sweep.trial import Trials

from .conftest import Setup


def test_a_trial_is_named_after_what_it_is(setup: Setup) -> None:
    trials = Trials(setup.config(knobs={"drafter.loop.optimizer.lr": ["1e-3", 0.001, 0.002]}))
    one, same, other = (trials.make({"drafter.loop.optimizer.lr": value}) for value in ("1e-3", 0.001, 0.002))
    assert one.name == same.name != other.name
    assert one.values == {"drafter.loop.optimizer.lr": 0.001}
    assert one.recipe["drafter"]["output"] == str(one.run)
    one.write()
    assert yaml.safe_load((one.folder / "recipe.yaml").read_text()) == one.recipe
    assert [trial.name for trial in trials.earlier()] == [one.name]
    assert Trials(setup.config()).earlier() == []  # other knobs


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"drafter.loop.sseed": [1]}, r"drafter\.loop\.sseed: there is no such key"),
        ({"drafter.loop.seed": [1, "x"]}, r"drafter\.loop\.seed: Input should be a valid integer"),
        ({"lm.batch": [1]}, r"knobs\.lm\.batch: a knob must be a key of the recipe's section drafter"),
        ({"drafter.output": ["a"]}, "except output"),
        ({"drafter.loop.steps.x": [1]}, "steps is not a section"),
    ],
)
def test_what_the_recipe_does_not_know_is_refused_before_anything_runs(setup: Setup, knobs: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Trials(setup.config(knobs=knobs)).check()
