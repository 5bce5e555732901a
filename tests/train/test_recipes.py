"""Every shipped recipe parses, strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.config import load_config
from eyas.errors import ConfigError
from eyas.train.recipes import Recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert {path.name for path in RECIPES} >= {"demo_target.yaml", "demo_drafter.yaml"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_recipe_parses(path: Path) -> None:
    load_config(Recipe, path)


def test_overrides_reach_and_typos_do_not() -> None:
    path = next(p for p in RECIPES if p.name == "demo_drafter.yaml")
    recipe = load_config(Recipe, path, ["drafter.loop.steps=7"])
    assert recipe.drafter is not None
    assert recipe.drafter.loop.steps == 7
    with pytest.raises(ConfigError, match=r"drafter\.loop\.step:"):
        load_config(Recipe, path, ["drafter.loop.step=7"])


def test_a_recipe_has_one_section(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="one section"):
        load_config(Recipe, tmp_path / "r.yaml")
